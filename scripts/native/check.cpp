// A check of the C++ without Python, for processors of another kind, which an emulator may stand in for.
//
// Products and attention of random numbers against sums in double. Prints what it has compared; ends with 1 if something
// is wrong.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gemm.h"

using gemm::Matrix;

extern "C" {
void multiply_float32(const float*, const Matrix<float>*, long, long, long, void*, long);
void multiply_bfloat16(const BFloat16*, const Matrix<BFloat16>*, long, long, long, void*, long);
long room_float32(long, long, long);
long room_bfloat16(long, long, long);
long attention_room_uint8();
void attend_float32(const float*, const float*, const float*, const float*, float*, char*, long, long, long, long, long,
                    long, long, long, long, long, float);
void attend_bfloat16(const BFloat16*, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, char*, long, long,
                     long, long, long, long, long, long, long, long, float);
}

static std::mt19937 generator(0);

static void put(float value, float* to) { *to = value; }
static void put(float value, BFloat16* to) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *to = bits >> 16;
}

template <class T>
static std::vector<T> random_numbers(long count) {
    std::normal_distribution<float> normal;
    std::vector<T> numbers(count);
    for (T& number : numbers) put(normal(generator), &number);
    return numbers;
}

static char* aligned(std::vector<char>& room) { return (char*)(((uintptr_t)room.data() + 63) / 64 * 64); }

static long wrong = 0;
static void compare(double found, double expected, double tolerance, const char* what) {
    if (std::fabs(found - expected) <= tolerance) return;
    if (wrong++ < 10) printf("%s: %g instead of %g\n", what, found, expected);
}

// Random blocks of MXFP4, and the numbers that they hold.
template <class T>
static std::vector<T> random_blocks(std::vector<uint8_t>& blocks) {
    const float sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    std::vector<T> numbers(blocks.size() / 17 * 32);
    for (uint8_t& byte : blocks) byte = generator();
    for (size_t i = 0; i < numbers.size(); i++) {
        uint8_t* const block = &blocks[i / 32 * 17];
        if (i % 32 == 0) block[0] = 123 + block[0] % 4;
        const int code = sizeof(T) == 2 ? block[1 + i % 32 / 2] >> i % 2 * 4 : block[1 + i % 16] >> i % 32 / 16 * 4;
        put(std::ldexp(sizes[code & 7], block[0] - 127) * (code & 8 ? -1 : 1), &numbers[i]);
    }
    return numbers;
}

// error: of the format of numbers, relative to numbers of about the size of a result.
template <class T, class Multiply>
static void check_products(Multiply multiply, long (*room_for)(long, long, long), long rows, long outputs, long inputs,
                           double error, gemm::Format format) {
    std::vector<uint8_t> blocks(outputs * inputs / 32 * 17);
    const bool in_blocks = format == gemm::MXFP4;
    const auto x = random_numbers<T>(rows * inputs);
    const auto weights = in_blocks ? random_blocks<T>(blocks) : random_numbers<T>(outputs * inputs);
    const auto bias = random_numbers<T>(outputs);
    std::vector<T> out(rows * outputs);
    std::vector<char> room(room_for(rows, inputs, 1) + 64);
    const void* const held = in_blocks ? (const void*)blocks.data() : weights.data();
    const Matrix<T> matrix = {held, nullptr, nullptr, nullptr, bias.data(), out.data(), outputs, inputs, nullptr, format};
    multiply(x.data(), &matrix, 1, rows, inputs, aligned(room), 1);
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < outputs; o++) {
            double sum = number(bias[o]);
            for (long i = 0; i < inputs; i++) sum += (double)number(x[row * inputs + i]) * number(weights[o * inputs + i]);
            compare(number(out[row * outputs + o]), sum, error * std::sqrt(inputs), "product");
        }
}

template <class T, class Attend>
static void check_attention(Attend attend, long rows, long cached, long heads, long key_heads, long size, double error) {
    const long keys = cached + rows;
    const auto query = random_numbers<T>(heads * rows * size);
    const auto key = random_numbers<T>(key_heads * keys * size), value = random_numbers<T>(key_heads * keys * size);
    std::vector<T> out(rows * heads * size);
    std::vector<char> room(attention_room_uint8() + 64);
    const float scaling = 1 / std::sqrt((float)size);
    attend(query.data(), key.data(), value.data(), nullptr, out.data(), aligned(room), heads, key_heads, rows, keys, 0, size,
           rows * size, size, keys * size, 1, scaling);
    for (long head = 0; head < heads; head++)
        for (long row = 0; row < rows; row++) {
            const long seen = cached + row + 1, from = head / (heads / key_heads) * keys * size;
            std::vector<double> weights(seen);
            double total = 0;
            for (long k = 0; k < seen; k++) {
                double score = 0;
                for (long i = 0; i < size; i++)
                    score += (double)number(query[(head * rows + row) * size + i]) * number(key[from + k * size + i]);
                total += weights[k] = std::exp(score * scaling);
            }
            for (long i = 0; i < size; i++) {
                double sum = 0;
                for (long k = 0; k < seen; k++) sum += weights[k] / total * number(value[from + k * size + i]);
                compare(number(out[(row * heads + head) * size + i]), sum, error, "attention");
            }
        }
}

int main() {
    for (long rows : {1, 2, 5, 16, 33})
        for (long outputs : {1, 7, 48, 100})
            for (long inputs : {64, 192, 576})
                for (gemm::Format format : {gemm::FLOATS, gemm::MXFP4}) {
                    check_products<float>(multiply_float32, room_float32, rows, outputs, inputs, 1e-5, format);
                    check_products<BFloat16>(multiply_bfloat16, room_bfloat16, rows, outputs, inputs, 2e-2, format);
                }
    for (long rows : {1, 4, 17})
        for (long cached : {0, 3, 300})
            for (long groups : {1, 3}) {
                check_attention<float>(attend_float32, rows, cached, 2 * groups, 2, 64, 1e-5);
                check_attention<BFloat16>(attend_bfloat16, rows, cached, 2 * groups, 2, 64, 3e-2);
            }
    printf("products and attention: %ld numbers are wrong\n", wrong);
    return wrong > 0;
}
