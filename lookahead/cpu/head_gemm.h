// GEMM of each head with its own matrix, in float32. It is small beside the GEMMs of whole layers. The order of each
// sum does not depend on other rows.

#pragma once

#include "vectors.h"

namespace heads {

using Floats = Lanes<WIDTH>::Floats;

// out[r][c] = the sum of x[r][i] * w[i][c] over i < inputs, for R rows and C vectors of columns.
template <int R, int C, class T>
static void sum_columns(const T* x, long x_stride, const T* w, long w_stride, long inputs, T* out, long out_stride) {
    Floats sums[R][C] = {};
    for (long i = 0; i < inputs; i++)
        for (int c = 0; c < C; c++) {
            const Floats weights = load(w + i * w_stride + c * WIDTH);
            for (int r = 0; r < R; r++) sums[r][c] += number(x[r * x_stride + i]) * weights;
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums[r][c], out + r * out_stride + c * WIDTH);
}

// out[r][o] = the sum of x[r][i] * w[o][i] over i < inputs, for R rows and O outputs.
template <int R, int O, class T>
static void sum_rows(const T* x, long x_stride, const T* w, long w_stride, long inputs, T* out, long out_stride) {
    Floats sums[R][O] = {};
    for (long i = 0; i < inputs; i += WIDTH)
        for (int o = 0; o < O; o++) {
            const Floats weights = load(w + o * w_stride + i);
            for (int r = 0; r < R; r++) sums[r][o] += load(x + r * x_stride + i) * weights;
        }
    for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) {
            float sum = 0;
            for (int lane = 0; lane < WIDTH; lane++) sum += sums[r][o][lane];
            store(sum, out + r * out_stride + o);
        }
}

// The products of R rows with n rows of w. A row of w has `width` numbers, a multiple of WIDTH. It belongs to an
// output, or to an input if w is transposed.
template <int R, class T>
static void multiply(const T* x, long x_stride, const T* w, long width, long n, bool is_transposed, T* out,
                     long out_stride) {
    long at = 0;
    if (is_transposed) {
        for (; at + 4 * WIDTH <= width; at += 4 * WIDTH)
            sum_columns<R, 4>(x, x_stride, w + at, width, n, out + at, out_stride);
        for (; at < width; at += WIDTH) sum_columns<R, 1>(x, x_stride, w + at, width, n, out + at, out_stride);
    } else {
        for (; at + 4 <= n; at += 4) sum_rows<R, 4>(x, x_stride, w + at * width, width, width, out + at, out_stride);
        for (; at < n; at++) sum_rows<R, 1>(x, x_stride, w + at * width, width, width, out + at, out_stride);
    }
}

}  // namespace heads
