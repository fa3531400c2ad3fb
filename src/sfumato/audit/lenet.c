/* The convolutions of many LeNets, forward and backward, one row after another inside the first caches.

   Called by lenet_kernel.py, which checks all sizes; lenet_passes.py has the same in PyTorch. A vector of 16
   floats is what the compiler makes of it on the processor at hand. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define UNROLLED _Pragma("GCC unroll 25") /* the sums stay in registers */
#define INLINE static inline __attribute__((always_inline))

enum { SIDE = 28, WIDE = 48, TALL = 32, OUT1 = 32, POOLED = 14, BAND = 84, OUT2 = 10, FILTERS1 = 6, LINE = 96 };
enum { ACTIVE1 = FILTERS1 * SIDE * OUT1, HIDDEN1 = POOLED * BAND + 16, ACTIVE2 = 1600 };
enum { KEPT = ACTIVE1 + HIDDEN1 + ACTIVE2 }; /* floats that a row leaves for its backward pass */

typedef float vector __attribute__((vector_size(64)));
typedef int32_t integers __attribute__((vector_size(64)));

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE float total(vector v) {
    v += __builtin_shuffle(v, (integers){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (integers){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (integers){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

INLINE vector choose(integers mask, vector yes, vector no) {
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
}

/* 1 - 2 / (exp(2 x) + 1), exp by a polynomial on [-ln 2 / 2, ln 2 / 2]: absolute error below 3e-7. */
INLINE vector hyperbolic_tangent(vector x) {
    const vector limit = (vector){} + 20.0f;
    vector y = 2.0f * x;
    y = choose(y > limit, limit, y);
    y = choose(y < -limit, -limit, y);
    const vector shifted = y * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    const vector whole = shifted - 12582912.0f;
    const vector r = (y - whole * 0.693145752f) - whole * 1.42860677e-6f;
    vector p = 1.0f / 720 + r * (1.0f / 5040);
    p = 1.0f / 120 + r * p;
    p = 1.0f / 24 + r * p;
    p = 1.0f / 6 + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * p;
    p = 1.0f + r * p;
    const integers power = (__builtin_convertvector(whole, integers) + 127) << 23;
    return 1.0f - 2.0f / (p * (vector)power + 1.0f);
}

INLINE void pad_image(const float *image, float *padded) {
    memset(padded, 0, sizeof(float) * TALL * WIDE);
    for (int y = 0; y < SIDE; y++) memcpy(padded + (y + 2) * WIDE + 2, image + y * SIDE, sizeof(float) * SIDE);
}

INLINE void first_forward(const float *padded, const float *weight, const float *bias, float *active) {
    for (int y = 0; y < SIDE; y++) {
        vector sums[FILTERS1][2];
        for (int f = 0; f < FILTERS1; f++) sums[f][0] = sums[f][1] = (vector){} + bias[f];
        for (int ky = 0; ky < 5; ky++)
            for (int kx = 0; kx < 5; kx++) {
                const float *at = padded + (y + ky) * WIDE + kx;
                const vector left = load(at), right = load(at + 16);
                UNROLLED for (int f = 0; f < FILTERS1; f++) {
                    const float w = weight[f * 25 + ky * 5 + kx];
                    sums[f][0] += w * left;
                    sums[f][1] += w * right;
                }
            }
        for (int f = 0; f < FILTERS1; f++)
            for (int half = 0; half < 2; half++)
                store(active + (f * SIDE + y) * OUT1 + 16 * half, hyperbolic_tangent(sums[f][half]));
    }
}

INLINE void first_pool(const float *active, float *hidden) {
    for (int f = 0; f < FILTERS1; f++)
        for (int y = 0; y < POOLED; y++) {
            const float *up = active + (f * SIDE + 2 * y) * OUT1;
            float both[OUT1];
            for (int half = 0; half < 2; half++)
                store(both + 16 * half, load(up + 16 * half) + load(up + OUT1 + 16 * half));
            for (int x = 0; x < POOLED; x++)
                hidden[y * BAND + x * FILTERS1 + f] = 0.25f * (both[2 * x] + both[2 * x + 1]);
        }
}

/* filters: (5, 30, 16), the output channel last */
INLINE void second_forward(const float *hidden, const float *filters, const float *bias, float *active) {
    for (int y = 0; y < OUT2; y++) {
        vector sums[OUT2];
        for (int x = 0; x < OUT2; x++) sums[x] = load(bias);
        for (int ky = 0; ky < 5; ky++)
            for (int k = 0; k < 30; k++) {
                const vector w = load(filters + (ky * 30 + k) * 16);
                const float *at = hidden + (y + ky) * BAND + k;
                UNROLLED for (int x = 0; x < OUT2; x++) sums[x] += at[x * FILTERS1] * w;
            }
        for (int x = 0; x < OUT2; x++) store(active + (y * OUT2 + x) * 16, hyperbolic_tangent(sums[x]));
    }
}

INLINE void second_pool(const float *active, float *features) {
    for (int y = 0; y < 5; y++)
        for (int x = 0; x < 5; x++) {
            const float *at = active + (2 * y * OUT2 + 2 * x) * 16;
            const vector mean = 0.25f * (load(at) + load(at + 16) + load(at + 160) + load(at + 176));
            for (int f = 0; f < 16; f++) features[f * 25 + y * 5 + x] = mean[f];
        }
}

/* The gradients of the second convolution's sums; their total is added to its bias. */
INLINE void second_unpool(const float *gradient, const float *active, float *sums, float *bias) {
    vector all = load(bias);
    for (int cell = 0; cell < 25; cell++) {
        vector mean;
        for (int f = 0; f < 16; f++) mean[f] = 0.25f * gradient[f * 25 + cell];
        for (int place = 0; place < 4; place++) {
            const int y = 2 * (cell / 5) + place / 2, x = 2 * (cell % 5) + place % 2;
            const vector t = load(active + (y * OUT2 + x) * 16);
            const vector g = mean * (1.0f - t * t);
            store(sums + (y * OUT2 + x) * 16, g);
            all += g;
        }
    }
    store(bias, all);
}

INLINE void second_filters(const float *hidden, const float *sums, float *filters) {
    for (int ky = 0; ky < 5; ky++)
        for (int block = 0; block < 30; block += 15) {
            vector parts[15];
            float *to = filters + (ky * 30 + block) * 16;
            for (int k = 0; k < 15; k++) parts[k] = load(to + 16 * k);
            for (int y = 0; y < OUT2; y++)
                for (int x = 0; x < OUT2; x++) {
                    const vector g = load(sums + (y * OUT2 + x) * 16);
                    const float *at = hidden + (y + ky) * BAND + x * FILTERS1 + block;
                    UNROLLED for (int k = 0; k < 15; k++) parts[k] += at[k] * g;
                }
            for (int k = 0; k < 15; k++) store(to + 16 * k, parts[k]);
        }
}

/* turned: (5, 16, 32), the output channel in the middle and two zeros at the end of each 30. The windows of
   neighbouring x overlap: each fifth goes to a line of its own, and the lines are added at the end, since a
   load that needs parts of two recent stores would wait for both. `lines` is zero where no window reaches. */
INLINE void second_backward(const float *sums, const float *turned, float lines[POOLED][5][LINE],
                            float *hidden) {
    for (int y = 0; y < POOLED; y++)
        for (int block = 0; block < OUT2; block += 5) {
            vector parts[5][2] = {0};
            const int first = y < OUT2 ? 0 : y - OUT2 + 1, last = y < 5 ? y : 4;
            for (int ky = first; ky <= last; ky++)
                for (int f = 0; f < 16; f++) {
                    const vector low = load(turned + (ky * 16 + f) * 32);
                    const vector high = load(turned + (ky * 16 + f) * 32 + 16);
                    UNROLLED for (int x = 0; x < 5; x++) {
                        const float g = sums[((y - ky) * OUT2 + block + x) * 16 + f];
                        parts[x][0] += g * low;
                        parts[x][1] += g * high;
                    }
                }
            for (int x = 0; x < 5; x++)
                for (int half = 0; half < 2; half++)
                    store(lines[y][x] + (block + x) * FILTERS1 + 16 * half, parts[x][half]);
        }
    for (int y = 0; y < POOLED; y++)
        for (int at = 0; at < BAND; at += 16) {
            vector all = load(lines[y][0] + at);
            for (int x = 1; x < 5; x++) all += load(lines[y][x] + at);
            store(hidden + y * BAND + at, all); /* what is too much, the next line overwrites */
        }
}

INLINE void first_filters(const float *padded, const float *active, const float *hidden, float *weight,
                          float *bias) {
    for (int f = 0; f < FILTERS1; f++) {
        vector parts[25] = {0}, all = {0};
        for (int y = 0; y < SIDE; y++) {
            float row[OUT1] = {0};
            const float *from = hidden + (y / 2) * BAND + f;
            for (int x = 0; x < SIDE; x++) row[x] = 0.25f * from[(x / 2) * FILTERS1];
            for (int half = 0; half < 2; half++) {
                const vector t = load(active + (f * SIDE + y) * OUT1 + 16 * half);
                const vector g = load(row + 16 * half) * (1.0f - t * t);
                const float *at = padded + y * WIDE + 16 * half;
                all += g;
                UNROLLED for (int k = 0; k < 25; k++) parts[k] += g * load(at + (k / 5) * WIDE + k % 5);
            }
        }
        for (int k = 0; k < 25; k++) weight[f * 25 + k] += total(parts[k]);
        bias[f] += total(all);
    }
}

/* images (., 28, 28); for each row its image and its model; weights (models, ...); features (rows, 400). */
FOR_EACH_PROCESSOR
void lenet_forward(int64_t rows, const float *images, const int64_t *image_of, const int64_t *model_of,
                   const float *weight1, const float *bias1, const float *filters2, const float *bias2,
                   float *kept, float *features) {
    float padded[TALL * WIDE];
    for (int64_t row = 0; row < rows; row++) {
        const int64_t model = model_of[row];
        float *active1 = kept + row * KEPT, *hidden = active1 + ACTIVE1, *active2 = hidden + HIDDEN1;
        pad_image(images + image_of[row] * SIDE * SIDE, padded);
        first_forward(padded, weight1 + model * 150, bias1 + model * FILTERS1, active1);
        first_pool(active1, hidden);
        second_forward(hidden, filters2 + model * 2400, bias2 + model * 16, active2);
        second_pool(active2, features + row * 400);
    }
}

/* Adds each row's gradients to those of its unit: weight1 (units, 150), filters2 (units, 5, 30, 16), ... */
FOR_EACH_PROCESSOR
void lenet_backward(int64_t rows, const float *images, const int64_t *image_of, const int64_t *model_of,
                    int64_t rows_of_unit, const float *turned2, const float *kept, const float *features,
                    float *weight1, float *bias1, float *filters2, float *bias2) {
    float padded[TALL * WIDE], sums[ACTIVE2], below[HIDDEN1 + 16], lines[POOLED][5][LINE] = {0};
    for (int64_t row = 0; row < rows; row++) {
        const int64_t unit = row / rows_of_unit;
        const float *active1 = kept + row * KEPT, *hidden = active1 + ACTIVE1, *active2 = hidden + HIDDEN1;
        second_unpool(features + row * 400, active2, sums, bias2 + unit * 16);
        second_filters(hidden, sums, filters2 + unit * 2400);
        second_backward(sums, turned2 + model_of[row] * 2560, lines, below);
        pad_image(images + image_of[row] * SIDE * SIDE, padded);
        first_filters(padded, active1, below, weight1 + unit * 150, bias1 + unit * FILTERS1);
    }
}

int32_t lenet_kept(void) { return KEPT; }
