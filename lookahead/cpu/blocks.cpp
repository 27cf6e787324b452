// Packing weights in fewer bits. A packed copy gives the same weights to the bit, except for the sign of a zero, or it
// is not used.
//
// Quantized files hold weights in groups. A weight is a small whole number times a scale, and some formats add an
// offset. Scales have few digits, so the products are exact. From unpacked floats, the original blocks of 8 or 4 bits
// are found again. So are the blocks of MXFP4, also from bf16. bf16 numbers, also in float32, are indexed
// (`indexed.h`).

#include <atomic>

#include "digest.h"
#include "gemm.h"

using namespace gemm;

constexpr float WHOLE = 3 << 22;  // numbers of this size have no fraction, so adding it rounds to whole numbers
constexpr int GROUP = 32;         // weights with one scale and one offset
constexpr int SIDE_BY_SIDE = 16;  // rows and inputs of a transposed matrix that are compared together

// Whether two vectors are equal, except for the sign of a zero. NaN equals nothing.
template <class Vector>
static bool are_equal(Vector a, Vector b) {
    const Ints differ = (Ints)(a != b);
    int any = 0;
    UNROLL for (int l = 0; l < L; l++) any |= differ[l];
    return !any;
}

// Whether these bytes times the scale are the weights.
template <int SIZE>
static bool are_bytes_of(const float* weights, float scale, const int8_t* bytes) {
    bool found = true;
    UNROLL for (int i = 0; i < SIZE; i += L)
        found &= are_equal(ByFloats::factors((const Grouped*)bytes + i, scale), ByFloats::factors(weights + i));
    return found;
}

// Write bytes that give the weights when multiplied by the scale. False if there are none.
template <int SIZE>
static bool write_bytes(const float* weights, float scale, int8_t* bytes) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    UNROLL for (int i = 0; i < SIZE; i += L) {
        const Floats nearest = ByFloats::factors(weights + i) * inverse + WHOLE - WHOLE;
        *(Unaligned<Lanes<L>::Bytes>*)(bytes + i) =
            __builtin_convertvector(__builtin_convertvector(nearest, Ints), Lanes<L>::Bytes);
    }
    return are_bytes_of<SIZE>(weights, scale, bytes);
}

// Find the bytes and the scale of a group. The largest byte is 127 in GGUF's Q8_0, 16 in Q5_0, and any up to 32 in
// Q6_K. most: the largest byte of the group before.
template <int SIZE>
static bool find_bytes(const float* weights, int& most, int8_t* bytes, float* scale) {
    float largest = 0;
    for (int i = 0; i < SIZE; i++) largest = std::max(largest, __builtin_fabsf(weights[i]));
    const auto fits = [&](int tried) { return write_bytes<SIZE>(weights, *scale = largest / tried, bytes); };
    if (fits(most)) return true;
    for (int tried : {127, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                      15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1})
        if (fits(tried)) {
            most = tried;
            return true;
        }
    return false;
}

// Whether these codes give the weights.
static bool are_codes_of(const float* weights, float scale, float offset, const Codes* codes) {
    bool found = true;
    UNROLL for (int i = 0; i < GROUP; i += L)
        found &= are_equal(ByFloats::factors(codes + i / 2, scale, offset), ByFloats::factors(weights + i));
    return found;
}

// Write codes that give the weights when multiplied by the scale and increased by the offset. False if there are none.
static bool write_codes(const float* weights, float scale, float offset, Codes* codes) {
    const float inverse = scale != 0 ? 1 / scale : 0;
    UNROLL for (int i = 0; i < GROUP; i += L) {
        const Floats nearest = (ByFloats::factors(weights + i) - offset) * inverse + WHOLE - WHOLE;
        pack(__builtin_convertvector(nearest, Ints) & 15, codes + i / 2);
    }
    return are_codes_of(weights, scale, offset, codes);
}

// The nearest number with 17 binary digits, as many as scales and offsets have in GGUF's Q4_K.
static float shortened(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x40) & ~0x7f;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Find the codes, the scale and the offset of a group.
static bool find_codes(const float* weights, Codes* codes, float* scale, float* offset) {
    float lowest = weights[0], highest = weights[0], smallest = weights[0];
    for (int i = 1; i < GROUP; i++) {
        lowest = std::min(lowest, weights[i]), highest = std::max(highest, weights[i]);
        smallest = __builtin_fabsf(weights[i]) < __builtin_fabsf(smallest) ? weights[i] : smallest;
    }
    const auto fits = [&](float s, float o) { return write_codes(weights, *scale = s, *offset = o, codes); };
    const float largest = -lowest > highest ? lowest : highest;  // has code 0 in GGUF's Q4_0, which means -8
    if (fits(largest / -8, largest)) return true;
    for (int steps = 15; steps > 0; steps--) {  // codes from the lowest to the highest: 15 in Q4_1, often fewer in Q4_K
        const float s = shortened((highest - lowest) / steps);
        const float above = __builtin_rintf((smallest - lowest) / s);  // the weight nearest to 0 has the smallest error
        for (int first = 0; first + steps < 16; first++)
            if (fits(s, shortened(smallest - (first + above) * s)) || (first && fits(s, 0))) return true;
    }
    return false;
}

// Whether `find(i)` is true for all i in 0..count-1. The first thread tries its share in ascending order, to stop
// early.
template <class Find>
static bool all_found(long count, long threads, Find find) {
    std::atomic<bool> found{find(0)};
    if (!found) return false;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 1; i < count; i++)
        if (found.load(std::memory_order_relaxed) && !find(i)) found.store(false, std::memory_order_relaxed);
    return found;
}

// The functions for Python. They pack `count` groups of weights, and set *found if all could be packed.

extern "C" void find_bytes_float32(const float* weights, long count, long size, int8_t* bytes, float* scales, float*,
                                   bool* found, long threads) {
    const auto find = size == GROUP ? find_bytes<GROUP> : find_bytes<GROUP / 2>;
    *found = all_found(count, threads, [=](long i) {
        static thread_local int most = 127;
        return find(weights + i * size, most, bytes + i * size, scales + i);
    });
}

extern "C" void find_codes_float32(const float* weights, long count, long, Codes* codes, float* scales, float* offsets,
                                   bool* found, long threads) {
    *found = all_found(count, threads, [=](long i) {
        return find_codes(weights + i * GROUP, codes + i * GROUP / 2, scales + i, offsets + i);
    });
}

// Whether these codes give these bytes, for STRIDE weights.
template <class By>
static bool are_same(const Codes* codes, const int8_t* bytes, float scale) {
    return are_equal(By::factors(codes, scale, -8 * scale), By::factors((const Grouped*)bytes, scale));
}

// Pack bytes as codes: a code is its byte plus 8, and the offset is -8 times the scale. scales, offsets: one for each
// `size` weights.
template <class By>
static void pack_all(const int8_t* bytes, long count, long size, Codes* codes, const float* scales, float* offsets,
                     bool* found, long threads) {
    *found = all_found(count, threads, [=](long group) {
        const long of = group * GROUP / size;
        const float scale = scales[of];
        offsets[of] = -8 * scale;
        bool same = true;
        for (long i = group * GROUP; i < (group + 1) * GROUP; i += By::STRIDE) {
            int8_t raised[By::STRIDE];
            for (int j = 0; j < By::STRIDE; j++) same &= !((raised[j] = bytes[i + j] + 8) & ~15);
            By::pack(raised, codes + i / 2);
            same &= are_same<By>(codes + i / 2, bytes + i, scale);
        }
        return same;
    });
}

extern "C" void pack_float32(const int8_t* bytes, long count, long size, Codes* codes, const float* scales,
                             float* offsets, bool* found, long threads) {
    pack_all<ByFloats>(bytes, count, size, codes, scales, offsets, found, threads);
}

extern "C" void pack_bfloat16(const int8_t* bytes, long count, long size, Codes* codes, const float* scales,
                              float* offsets, bool* found, long threads) {
    pack_all<Pairs>(bytes, count, size, codes, scales, offsets, found, threads);
}

// Whether a block of MXFP4 gives these weights, to the bit.
template <class By>
static bool is_mxfp4(const typename By::Number* weights, const uint8_t* block) {
    const auto scales = gguf::MXFP4::read(block);
    Ints differ = {};
    UNROLL for (int i = 0; i < GROUP; i += By::STRIDE)
        differ |= (Ints)gguf::factors<By, gguf::MXFP4>(block, i, scales) ^ (Ints)By::factors(weights + i);
    return are_equal(differ, Ints{});
}

// The codes of weights. inverse: that of half their power of two, which makes whole numbers of weights that have codes.
static Ints codes_of(Floats weights, float inverse) {
    const Floats sizes = (Floats)((Ints)weights & INT32_MAX) * inverse;
    const Ints codes = sizes < 2 ? (Ints)(sizes >= 1) & 1 : ((Ints)sizes >> 22) - 254;
    return (codes & 7) | ((Ints)weights >> 28 & 8);
}

// Write the block of MXFP4 that gives these weights. False if there is none. The power of two is the one for which the
// largest weight has the highest exponent of a code; if any power of two works, this one does.
template <class By>
static bool write_mxfp4(const typename By::Number* weights, uint8_t* block) {
    float largest = 0;
    for (int i = 0; i < GROUP; i++) largest = std::max(largest, __builtin_fabsf(number(weights[i])));
    uint32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    block[0] = bits >> 23 < 4 ? 127 : (bits >> 23) - 2;  // 127 for blocks of zeros; weights below 2^-123 then fail
    bits = (255 - block[0]) << 23;
    float inverse;
    memcpy(&inverse, &bits, sizeof inverse);
    UNROLL for (int i = 0; i < GROUP / 2; i += L) {
        Floats first, second;
        if constexpr (sizeof(*weights) == 4)
            first = By::factors(weights + i), second = By::factors(weights + i + GROUP / 2);
        else
            first = low(By::factors(weights + 2 * i)), second = high(By::factors(weights + 2 * i));
        const Ints both = codes_of(first, inverse) | codes_of(second, inverse) << 4;
        *(Unaligned<Lanes<L>::Bytes>*)(block + 1 + i) = __builtin_convertvector(both, Lanes<L>::Bytes);
    }
    return is_mxfp4<By>(weights, block);
}

template <class By>
static bool find_all_mxfp4(const typename By::Number* weights, long count, uint8_t* blocks, long threads) {
    return all_found(count, threads, [=](long i) {
        return write_mxfp4<By>(weights + i * GROUP, blocks + i * gguf::MXFP4::BYTES);
    });
}

extern "C" void find_mxfp4_float32(const float* weights, long count, long, uint8_t* blocks, float*, float*, bool* found,
                                   long threads) {
    *found = find_all_mxfp4<ByFloats>(weights, count, blocks, threads);
}

extern "C" void find_mxfp4_bfloat16(const BFloat16* weights, long count, long, uint8_t* blocks, float*, float*,
                                    bool* found, long threads) {
    *found = find_all_mxfp4<Pairs>(weights, count, blocks, threads);
}

#ifdef __AVX2__

static BFloat16 upper_half(BFloat16 x) { return x; }
static BFloat16 upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
}

#ifdef HAS_AMX
constexpr bool BY_TILES = true;

// Writes the patches of rows that lie together.
struct Patches {
    typedef Indexed::Rows<uint8_t> Rows;
    const Rows& rows;
    Rows::Patch of_block[Rows::ALL];
    long written = 0, found = 0;  // found: in this block

    explicit Patches(const Rows& rows) : rows(rows) {}
    void add(long, long vector, long line, long byte, uint8_t upper) {
        const long at = (vector * Indexed::TOGETHER + line) * sizeof(Ints) + byte;
        if (found < Rows::ALL) of_block[found] = {{uint8_t(at), uint8_t(at >> 8)}, upper};
        found++;
    }
    void end_block(long i) {
        const bool fit = found < Rows::ALL && written + found <= rows.room();
        *rows.exceptions(i) = fit ? found : Rows::ALL;
        if (fit) std::copy_n(of_block, found, rows.patches() + written), written += found;
        found = 0;
    }
    void end() {}
};
#else
constexpr bool BY_TILES = false;

// Writes the patches of rows that lie together.
struct Patches {
    typedef Indexed::Rows<uint8_t> Rows;
    const Rows& rows;
    long found = 0;

    explicit Patches(const Rows& rows) : rows(rows) {}
    void add(long i, long vector, long line, long byte, uint8_t upper) {
        if (found < rows.room()) rows.patches()[found] = {uint32_t(rows.place(line, i)), uint8_t(vector), uint8_t(byte), upper};
        found++;
    }
    void end_block(long) {}
    void end() {
        rows.patched() = found <= rows.room() ? found : Rows::ALL;
        std::sort(rows.patches(), rows.patches() + std::min(found, rows.room()), [](auto a, auto b) { return a.line < b.line; });
    }
};
#endif

// Whether all numbers are bf16 numbers. float32 numbers must also be finite, because AMX multiplies them by parts of
// the input that may be zero.
static bool are_bfloat16(const BFloat16*, long) { return true; }
static bool are_bfloat16(const float* weights, long n) {
    Ints lower = {};
    Floats zeros = {};
    for (long i = 0; i < n; i += L) {
        const Floats some = ByFloats::factors(weights + i);
        lower |= (Ints)some;
        if (BY_TILES) zeros += some * 0.0f;
    }
    return are_equal(lower & 0xffff, Ints{}) && are_equal(zeros, Floats{});
}

// AMX flushes products below 2^-126 to zero, where float32 would still add them. So the largest weight of a row must be
// far above that.
static bool is_far_above_zero(const BFloat16*, long) { return true; }
static bool is_far_above_zero(const float* weights, long inputs) {
    if (!BY_TILES) return true;
    float largest = 0;
    for (long i = 0; i < inputs; i++) largest = std::max(largest, __builtin_fabsf(weights[i]));
    return largest == 0 || largest >= 0x1p-40f;
}

// Whether indexed rows hold inputs begin..end-1 of rows first..last-1 of a matrix.
template <class T>
static bool are_indexed(const T* matrix, long first, long last, const Indexed::Rows<const uint8_t>& rows, long begin,
                        long end) {
    for (long row = first; row < last; row++)
        if (!are_bfloat16(matrix + row * rows.inputs + begin, end - begin)) return false;
    Ints differ = {};
    for (long i = begin; i < end; i += Indexed::BLOCK) {
        if (rows.are_read(i)) continue;
        Ints halves[2][Indexed::TOGETHER], unpacked[2][Indexed::TOGETHER];
        Indexed::take_block(matrix + first * rows.inputs + i, last - first, rows.inputs, halves[0], halves[1]);
        for (long line = 0; line < Indexed::TOGETHER; line++) {
            Ints two[2];
            Indexed::look_up(rows.lower(line, i), rows.codes(line, i), Indexed::table_of(rows.tables()), two);
            unpacked[0][line] = two[0], unpacked[1][line] = two[1];
        }
        rows.patch(i, unpacked[0], unpacked[1]);
        for (int half = 0; half < 2; half++)
            for (long line = 0; line < Indexed::TOGETHER; line++) differ |= unpacked[half][line] ^ halves[half][line];
    }
    for (long row = last - first; row < L; row++) differ[row] = 0;  // a lane is a row
    return are_equal(differ, Ints{});
}

// Write tables of the most frequent upper bytes of these rows. code_of: for each table, the code of each byte, or 16.
template <class T>
static void write_tables(const T* matrix, long first, long last, const Indexed::Rows<uint8_t>& rows, uint8_t (*code_of)[256]) {
    for (long table = 0; table < Indexed::TABLES; table++) {
        int counts[256] = {}, known = 0;
        uint8_t bytes[256];
        const long begin = std::min(first + table * Indexed::OF_TABLE, last), end = std::min(begin + Indexed::OF_TABLE, last);
        for (long i = begin * rows.inputs; i < end * rows.inputs; i++) {
            const uint8_t byte = upper_half(matrix[i]) >> 8;
            if (!counts[byte]++) bytes[known++] = byte;
        }
        const int kept = std::min(known, 16);
        std::partial_sort(bytes, bytes + kept, bytes + known, [&](int a, int b) { return counts[a] > counts[b]; });
        memset(code_of[table], 16, sizeof code_of[table]);
        for (int i = 0; i < kept; i++) code_of[table][rows.tables()[table * 16 + i] = bytes[i]] = i;
    }
}

// Index these rows.
template <class T>
static void write_indexed(const T* matrix, long first, long last, const Indexed::Rows<uint8_t>& rows) {
    const long inputs = rows.inputs;
    uint8_t code_of[Indexed::TABLES][256];
    write_tables(matrix, first, last, rows, code_of);
    Patches patches(rows);
    for (long i = 0; i < inputs; i += Indexed::BLOCK) {
        Ints halves[2][Indexed::TOGETHER];
        BFloat16 numbers[2][Indexed::TOGETHER][2 * L];
        Indexed::take_block(matrix + first * inputs + i, last - first, inputs, halves[0], halves[1]);
        memcpy(numbers, halves, sizeof numbers);
        for (long line = 0; line < Indexed::TOGETHER; line++) {
            uint8_t found[Indexed::BLOCK] = {};
            for (long place = 0; place < Indexed::BLOCK; place++) {
                const long vector = Indexed::vector_of(place), number = Indexed::number_of(place), row = number / 2;
                if (row >= last - first) continue;  // beyond the matrix
                const BFloat16 weight = numbers[vector][line][number];
                rows.lower(line, i)[place] = weight & 255;
                found[place] = code_of[row / Indexed::OF_TABLE][weight >> 8];
                if (found[place] == 16) patches.add(i, vector, line, number * sizeof weight + 1, weight >> 8);
            }
            for (long place = 0; place < Indexed::BLOCK / 2; place++)
                rows.codes(line, i)[place] = (found[place] & 15) | found[place + Indexed::BLOCK / 2] << 4;
        }
        patches.end_block(i);
    }
    patches.end();
}

// Index rows first..last-1, which are packed together. Returns how many blocks must be read from the original matrix,
// or more than there are if some weights cannot be indexed.
template <class T>
static long index_rows(const T* matrix, long first, long last, long inputs, uint8_t* to) {
    for (long row = first; row < last; row++) {
        const T* const weights = matrix + row * inputs;
        if (!are_bfloat16(weights, inputs) || !is_far_above_zero(weights, inputs)) return (last - first) * inputs;
    }
    const Indexed::Rows<uint8_t> rows(to, first, inputs);
    write_indexed(matrix, first, last, rows);
    long read = 0;
    for (long i = 0; i < inputs; i += Indexed::BLOCK) read += rows.are_read(i) ? last - first : 0;
    return read;
}

// Index a matrix. *found: whether few blocks must be read from the original matrix. The first rows are tried first.
template <class T>
static void index_all(const T* weights, long outputs, long inputs, uint8_t* to, bool* found, long threads) {
    const long blocks = inputs / Indexed::BLOCK, first = std::min(outputs, 16L);
    long read = 0;
    std::atomic<bool> are_numbers{true};
    const auto index = [&](long o) {
        const long count = index_rows(weights, o, std::min(outputs, o + Indexed::TOGETHER), inputs, to);
        if (count > blocks * Indexed::TOGETHER) are_numbers.store(false, std::memory_order_relaxed);
        return count;
    };
    const auto is_found = [&](long rows) { return are_numbers && read * 4 <= rows * blocks; };
    for (long o = 0; o < first && are_numbers; o += Indexed::TOGETHER) read += index(o);
    *found = is_found(first);
    if (!*found) return;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : read)
    for (long o = first; o < outputs; o += Indexed::TOGETHER)
        if (are_numbers.load(std::memory_order_relaxed)) read += index(o);
    *found = is_found(outputs);
}

// size: inputs. bytes: [count, rounded up to TOGETHER][Indexed::bytes(size)], which must be zero at first.

extern "C" void index_float32(const float* weights, long count, long size, uint8_t* bytes, float*, float*, bool* found,
                              long threads) {
    index_all(weights, count, size, bytes, found, threads);
}

extern "C" void index_bfloat16(const BFloat16* weights, long count, long size, uint8_t* bytes, float*, float*,
                               bool* found, long threads) {
    index_all(weights, count, size, bytes, found, threads);
}

#endif

// A matrix, and the copy that was made of it.
struct Copy {
    const void* weights;         // [outputs][inputs]
    const float* given;          // their scales, if they are bytes in groups; otherwise null
    const void* packed;
    const float *scales, *offsets;  // of the copy, [outputs][inputs / group], or null
    long outputs, inputs, group;
    long stride;    // not 0 if the copy is transposed: then the weights are [inputs][stride]
    Format format;  // of the copy

    long together() const { return stride ? SIDE_BY_SIDE : format == INDEXED ? Indexed::TOGETHER : 1; }  // rows
    long block() const {  // inputs
        return format == INDEXED ? Indexed::BLOCK : format == FLOATS ? SIDE_BY_SIDE : GROUP;
    }
};

// The same for a transposed copy. Numbers are compared by their bits.
template <class Bits>
static bool are_transposed(const Copy& copy, long first, long last, long begin, long end) {
    Bits differ = 0;
    for (long i = begin; i < end; i++)
        for (long row = first; row < last; row++)
            differ |= ((const Bits*)copy.weights)[i * copy.stride + row] ^ ((const Bits*)copy.packed)[row * copy.inputs + i];
    return !differ;
}

// The same for a copy in MXFP4, transposed or not.
template <class By>
static bool are_mxfp4(const Copy& copy, long first, long last, long begin, long end) {
    typedef typename By::Number T;
    const long of_row = copy.stride ? 1 : copy.inputs, of_input = copy.stride ? copy.stride : 1;
    for (long i = begin; i < end; i += GROUP)
        for (long row = first; row < last; row++) {
            const T* const weights = (const T*)copy.weights + row * of_row + i * of_input;
            T together[GROUP];
            for (int j = 0; j < GROUP; j++) together[j] = weights[j * of_input];
            const long block = (row * copy.inputs + i) / GROUP;
            if (!is_mxfp4<By>(together, (const uint8_t*)copy.packed + block * gguf::MXFP4::BYTES)) return false;
        }
    return true;
}

// Whether a copy holds inputs begin..end-1 of rows first..last-1, which are packed together. The range is whole blocks.
template <class By>
static bool holds(const Copy& copy, long first, long last, long begin, long end) {
    typedef typename By::Number T;
    if (copy.format == MXFP4) return are_mxfp4<By>(copy, first, last, begin, end);
    if (copy.stride)
        return are_transposed<std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>(copy, first, last, begin, end);
#ifdef __AVX2__
    if (copy.format == INDEXED)
        return are_indexed((const T*)copy.weights, first, last, {(const uint8_t*)copy.packed, first, copy.inputs}, begin,
                           end);
#endif
    for (long row = first; row < last; row++)
        for (long i = begin; i < end; i += GROUP) {
            const long at = row * copy.inputs + i, of = at / copy.group;
            const Codes* const codes = (const Codes*)copy.packed + at / 2;
            if (copy.given) {
                const int8_t* const bytes = (const int8_t*)copy.weights + at;
                if (copy.given[of] != copy.scales[of]) return false;
                for (long j = 0; j < GROUP; j += By::STRIDE)
                    if (!are_same<By>(codes + j / 2, bytes + j, copy.scales[of])) return false;
            } else if constexpr (sizeof(T) == 4) {
                const T* const weights = (const T*)copy.weights + at;
                const int8_t* const bytes = (const int8_t*)copy.packed + at;
                if (copy.offsets) {
                    if (!are_codes_of(weights, copy.scales[of], copy.offsets[of], codes)) return false;
                } else {
                    for (long j = 0; j < GROUP; j += GROUP / 2)
                        if (!are_bytes_of<GROUP / 2>(weights + j, copy.scales[(at + j) / copy.group], bytes + j))
                            return false;
                }
            }
        }
    return true;
}

// Whether weights have changed since they were packed. Each turn checks one of `parts` parts of the copies, and one
// block of each copy, another in each turn. It reads only a few cache lines, so threads would take longer to start.
template <class By>
static bool have_changed(const Copy* copies, long count, long turn, long parts) {
    for (long part = turn % parts, i = count * part / parts; i < count * (part + 1) / parts; i++) {
        const Copy& copy = copies[i];
        const long together = copy.together(), groups = (copy.outputs + together - 1) / together;
        const uint64_t place = (turn + i) * 0x9e3779b97f4a7c15 >> 16;  // scattered, so that no row waits long
        const long first = place % groups * together, begin = place / groups % (copy.inputs / copy.block()) * copy.block();
        if (!holds<By>(copy, first, std::min(copy.outputs, first + together), begin, begin + copy.block())) return true;
    }
    return false;
}

extern "C" bool changed_float32(const Copy* copies, long count, long turn, long parts) {
    return have_changed<ByFloats>(copies, count, turn, parts);
}
extern "C" bool changed_bfloat16(const Copy* copies, long count, long turn, long parts) {
    return have_changed<Pairs>(copies, count, turn, parts);
}

struct Memory {
    const char* bytes;
    long size;
};

// Add up the digests of some memory. digests: [count][LANES], which must be zero at first.
extern "C" void digest_uint8(const Memory* all, long count, uint64_t* digests, long threads) {
    constexpr long PART = 1 << 18;  // bytes that a thread takes at a time
    long parts = 0;
    for (long i = 0; i < count; i++) parts += (all[i].size + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < parts; part++) {
        long which = 0, before = part;
        for (long its; before >= (its = (all[which].size + PART - 1) / PART); which++) before -= its;
        const long begin = before * PART, end = std::min(all[which].size, begin + PART);
        digest::add(digest::of(all[which].bytes, begin, end), digests + which * digest::LANES);
    }
}
