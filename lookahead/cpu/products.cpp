// Products of a few rows with weights in torch's own order, for single layers (`products.h`).

#include "products.h"

using namespace products;

constexpr long BLOCK = 96;        // outputs that a thread takes at a time
constexpr long GROUP = 32;        // weights with one scale in GGUF's Q8_0 and Q4_0
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

// Find the bytes and the scale that a group of weights was made of, if its largest weight is `most` times the scale.
// Their products are the weights, bit for bit but for the sign of a zero.
static bool find_bytes(const float* weights, float most, int8_t* bytes, float* scale) {
    constexpr float WHOLE = 3 << 22;  // numbers of this size have no fraction, so adding it rounds
    constexpr int N = GROUP / L;
    Floats w[N];
    Ints differ = {}, largest = {};
    memcpy(w, weights, sizeof w);
    UNROLL for (int i = 0; i < N; i++) {
        const Ints size = (Ints)w[i] & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    int32_t bits = 0;
    for (int l = 0; l < L; l++) bits = std::max(bits, largest[l]);
    memcpy(scale, &bits, sizeof bits);
    *scale /= most;
    const float inverse = *scale > 0 ? 1 / *scale : 0;
    UNROLL for (int i = 0; i < N; i++) {
        const Floats nearest = w[i] * inverse + WHOLE - WHOLE;
        differ |= nearest * *scale != w[i];
        *(Unaligned<Lanes<L>::Bytes>*)(bytes + i * L) =
            __builtin_convertvector(__builtin_convertvector(nearest, Ints), Lanes<L>::Bytes);
    }
    int any = 0;
    for (int l = 0; l < L; l++) any |= differ[l];
    return !any;
}

// The same for `groups` groups, until one has no bytes. GGUF's Q8_0 goes to 127 times the scale, its Q4_0 to 8 times.
extern "C" void find_bytes_float32(const float* weights, long groups, int8_t* bytes, float* scales, bool* found,
                                   long threads) {
    *found = false;
    for (const float most : {127.0f, 8.0f}) {
        if (*found || !find_bytes(weights, most, bytes, scales)) continue;
        *found = true;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (long i = 0; i < groups; i++)
            if (*(volatile bool*)found && !find_bytes(weights + i * GROUP, most, bytes + i * GROUP, scales + i))
                *(volatile bool*)found = false;
    }
}

#define FOR(NAME, T, BY)                                                                                         \
    extern "C" void NAME(const T* x, const Matrix<T>* matrices, long count, long rows, long inputs, float* room, \
                         long threads) {                                                                         \
        multiply_all<BY>(x, matrices, count, rows, inputs, room, threads);                                           \
    }

FOR(multiply_float32, float, ByFloats)
FOR(multiply_bfloat16, BFloat16, ByPairs)
