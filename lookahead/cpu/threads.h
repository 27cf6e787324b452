// Functions of OpenMP, declared here because some compilers support its pragmas but lack omp.h.

#pragma once

extern "C" int omp_get_thread_num();   // of this thread in its parallel region
extern "C" int omp_get_num_threads();  // of the region
