// What GCC's OpenMP code calls, by std::thread: ThreadSanitizer does not know how libgomp's threads wait for each other.

#include <pthread.h>

#include <thread>
#include <vector>

static thread_local int index_here = 0, count_here = 1;
static thread_local pthread_barrier_t* barrier_here = nullptr;

extern "C" {
int omp_get_thread_num() { return index_here; }
int omp_get_num_threads() { return count_here; }
void GOMP_barrier() {
    if (count_here > 1) pthread_barrier_wait(barrier_here);
}

void GOMP_parallel(void (*run)(void*), void* data, unsigned count, unsigned) {
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, nullptr, count);
    const auto run_as = [&](int index) {
        index_here = index, count_here = count, barrier_here = &barrier;
        run(data);
        index_here = 0, count_here = 1, barrier_here = nullptr;
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < count; i++) others.emplace_back(run_as, i);
    run_as(0);
    for (std::thread& other : others) other.join();
    pthread_barrier_destroy(&barrier);
}
}
