// Products of a few rows with weights in torch's own order, for single layers (`products.h`).

#include "products.h"

using namespace products;

constexpr long BLOCK = 96;        // outputs that a thread takes at a time
constexpr long SMALL_BLOCK = 24;  // the same for several tiles, so that the weights stay in the processor's cache

// Multiply x [rows][inputs] with each matrix. inputs is a multiple of STRIDE. room: as many floats as x has numbers.
template <class By>
static void multiply_all(const typename By::Number* x, const Matrix<typename By::Number>* matrices, long count,
                         long rows, long inputs, float* room, long threads) {
    typedef typename By::Prepared Prepared;
    if (rows == 0) return;
    const long size = rows > TILE ? SMALL_BLOCK : BLOCK;
    long blocks = 0;
    for (long i = 0; i < count; i++) blocks += (matrices[i].outputs + size - 1) / size;
#pragma omp parallel num_threads(threads)
    {
        const Prepared* prepared;
        if constexpr (sizeof(Prepared) == sizeof(typename By::Number)) {
            prepared = x;
        } else {
            prepared = room;
#pragma omp for schedule(static)
            for (long i = 0; i < rows * inputs; i += By::STRIDE) By::prepare(x + i, room + i);
        }
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) {
            long before = block, which = 0;
            for (long its; before >= (its = (matrices[which].outputs + size - 1) / size); which++) before -= its;
            const Matrix<typename By::Number>& matrix = matrices[which];
            const long begin = before * size, end = std::min(matrix.outputs, begin + size);
            multiply<By>(rows, prepared, matrix, inputs, begin, end);
        }
    }
}

#define FOR(NAME, T, BY)                                                                                         \
    extern "C" void NAME(const T* x, const Matrix<T>* matrices, long count, long rows, long inputs, float* room, \
                         long threads) {                                                                         \
        multiply_all<BY>(x, matrices, count, rows, inputs, room, threads);                                           \
    }

FOR(multiply_float32, float, ByFloats)
FOR(multiply_bfloat16, BFloat16, ByPairs)
