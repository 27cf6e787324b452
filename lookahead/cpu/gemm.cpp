// GEMM for single layers (`gemm.h`).

#include "gemm.h"
#include "threads.h"

namespace gemm {
FOR_EACH_WAY(MULTIPLY);
}

using namespace gemm;

constexpr long BLOCK = 96;  // outputs that a thread computes at a time

template <class By>
static long room(long rows, long inputs, long threads) {
    return aligned(Input<By>::bytes(rows, inputs)) + threads * bytes_of_panel<By>(inputs);
}

// Multiply x [rows][inputs] by each matrix. inputs is a multiple of STRIDE. room: the memory that `Input` needs.
template <class By>
static void multiply_all(const typename By::Number* x, const Matrix<typename By::Number>* matrices, long count,
                         long rows, long inputs, void* room, long threads) {
    if (rows == 0) return;
    int forms = 0;
    for (long i = 0; i < count; i++) forms |= Input<By>::form_for(matrices[i], rows, inputs);
    long blocks = 0;
    for (long i = 0; i < count; i++) blocks += (matrices[i].outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        const AmxUnit unit;
        const long before_panel = aligned(Input<By>::bytes(rows, inputs)) + omp_get_thread_num() * bytes_of_panel<By>(inputs);
        const Input<By> input = {x, rows, inputs, room, forms, (Ints*)((char*)room + before_panel)};
#pragma omp for schedule(static)
        for (long part = 0; part < input.parts(); part++) input.make(part);
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) {
            long before = block, which = 0;
            for (long its; before >= (its = (matrices[which].outputs + BLOCK - 1) / BLOCK); which++) before -= its;
            const long begin = before * BLOCK, end = std::min(matrices[which].outputs, begin + BLOCK);
            multiply(input, matrices[which], begin, end, nullptr);
        }
    }
}

// The functions for Python. room: number of its bytes; it is aligned to 64 bytes.

extern "C" long room_float32(long rows, long inputs, long threads) { return room<ByFloats>(rows, inputs, threads); }

extern "C" long room_bfloat16(long rows, long inputs, long threads) {
    return by_pairs([=](auto by) { return room<decltype(by)>(rows, inputs, threads); });
}

extern "C" void multiply_float32(const float* x, const Matrix<float>* matrices, long count, long rows, long inputs,
                                 void* room, long threads) {
    multiply_all<ByFloats>(x, matrices, count, rows, inputs, room, threads);
}

extern "C" void multiply_bfloat16(const BFloat16* x, const Matrix<BFloat16>* matrices, long count, long rows,
                                  long inputs, void* room, long threads) {
    by_pairs([=](auto by) { multiply_all<decltype(by)>(x, matrices, count, rows, inputs, room, threads); });
}
