// GEMM of a few rows for single layers (`gemm.h`).

#include "gemm.h"

namespace gemm {
FOR_EACH_WAY(MULTIPLY);
}

using namespace gemm;

constexpr long BLOCK = 96;        // outputs that a thread takes at a time
constexpr long SMALL_BLOCK = 24;  // the same for several tiles of rows, so that the weights stay in the first caches

// Multiply x [rows][inputs] with each matrix. inputs is a multiple of STRIDE. room: as `Input` needs it.
template <class By>
static void multiply_all(const typename By::Number* x, const Matrix<typename By::Number>* matrices, long count,
                         long rows, long inputs, void* room, long threads) {
    if (rows == 0) return;
    int forms = 0;
    for (long i = 0; i < count; i++) forms |= Input<By>::form_for(matrices[i], inputs);
    const long size = rows > MR && !forms ? SMALL_BLOCK : BLOCK;
    long blocks = 0;
    for (long i = 0; i < count; i++) blocks += (matrices[i].outputs + size - 1) / size;
    const Input<By> input = {x, rows, inputs, room, forms};
#pragma omp parallel num_threads(threads)
    {
        const AmxUnit unit;
#pragma omp for schedule(static)
        for (long part = 0; part < input.parts(); part++) input.make(part);
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) {
            long before = block, which = 0;
            for (long its; before >= (its = (matrices[which].outputs + size - 1) / size); which++) before -= its;
            const long begin = before * size, end = std::min(matrices[which].outputs, begin + size);
            multiply(input, matrices[which], begin, end, nullptr);
        }
    }
}

// The functions for Python. room: its bytes.

extern "C" long room_float32(long rows, long inputs) { return Input<ByFloats>::bytes(rows, inputs); }

extern "C" long room_bfloat16(long rows, long inputs) {
    return by_pairs([=](auto by) { return Input<decltype(by)>::bytes(rows, inputs); });
}

extern "C" void multiply_float32(const float* x, const Matrix<float>* matrices, long count, long rows, long inputs,
                                 void* room, long threads) {
    multiply_all<ByFloats>(x, matrices, count, rows, inputs, room, threads);
}

extern "C" void multiply_bfloat16(const BFloat16* x, const Matrix<BFloat16>* matrices, long count, long rows,
                                  long inputs, void* room, long threads) {
    by_pairs([=](auto by) { multiply_all<decltype(by)>(x, matrices, count, rows, inputs, room, threads); });
}
