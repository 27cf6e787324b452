// What the sources call of OpenMP: not every compiler that knows its pragmas brings omp.h.

#pragma once

extern "C" int omp_get_thread_num();   // of this thread in its parallel region
extern "C" int omp_get_num_threads();  // of the region
