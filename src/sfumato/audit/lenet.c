/* The convolutions of many LeNets, forward and backward, one row after another inside the first caches.

   Called by lenet_kernel.py; lenet_windows.py has the same in PyTorch. A vector of 16 floats is what the
   compiler makes of it for the instruction set at hand. As in gradients/kernels, each function takes a path,
   returns a status, and writes nothing unless its arguments fit each other. */

#include <string.h>

#include "../gradients/kernels/checks.h"
#include "../gradients/kernels/processor.h"

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)") /* the sums stay in registers */
#else
#define UNROLLED _Pragma("GCC unroll 25")
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64))) /* to vectors: one that lies across two lines is loaded twice */

enum { LENET_VERSION = 2 }; /* one more whenever arguments change; lenet_kernel.py knows it too */

enum { SIDE = 28, WIDE = 48, TALL = 32, OUT1 = 32, POOLED = 14, BAND = 84, OUT2 = 10, FILTERS1 = 6, LINE = 96 };
enum { ACTIVE1 = FILTERS1 * SIDE * OUT1, HIDDEN1 = POOLED * BAND + 16, ACTIVE2 = 1600 };
enum { KEPT = ACTIVE1 + HIDDEN1 + ACTIVE2 }; /* floats that a row leaves for its backward pass */
enum { IMAGE = SIDE * SIDE, WEIGHT1 = FILTERS1 * 25, WEIGHT2 = 2400, TURNED2 = 2560, FEATURES = 400 };

typedef float vector __attribute__((vector_size(64)));
typedef int32_t bits __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE float total(vector v) {
    eight halves[2];
    four quarters[2];
    memcpy(halves, &v, sizeof v);
    halves[0] += halves[1];
    memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

INLINE vector choose(bits mask, vector yes, vector no) {
    return (vector)((mask & (bits)yes) | (~mask & (bits)no));
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
    const bits power = (__builtin_convertvector(whole, bits) + 127) << 23;
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

/* images (., 28, 28); for each row its image (-1: no row) and its model; weights (models, ...);
   features (rows, 400). */
struct forward {
    struct floats images;
    struct integers image_of, model_of;
    struct floats weight1, bias1, filters2, bias2, kept, features;
};

/* turned2 (models, 5, 16, 32); kept and the gradient of features by row; results by unit: weight1 (units, 150),
   filters2 (units, 5, 30, 16), ... */
struct backward {
    struct floats images;
    struct integers image_of, model_of;
    int64_t rows_of_unit;
    struct floats turned2, kept, features, weight1, bias1, filters2, bias2;
};

INLINE void forward_rows(const struct forward *a) {
    ALIGNED float padded[TALL * WIDE];
    for (int64_t row = 0; row < a->image_of.count; row++) {
        const int64_t model = a->model_of.values[row], image = a->image_of.values[row];
        if (image < 0) { /* there is no such row */
            memset(a->features.values + row * FEATURES, 0, sizeof(float) * FEATURES);
            continue;
        }
        float *active1 = a->kept.values + row * KEPT, *hidden = active1 + ACTIVE1;
        float *active2 = hidden + HIDDEN1;
        pad_image(a->images.values + image * IMAGE, padded);
        first_forward(padded, a->weight1.values + model * WEIGHT1, a->bias1.values + model * FILTERS1, active1);
        first_pool(active1, hidden);
        second_forward(hidden, a->filters2.values + model * WEIGHT2, a->bias2.values + model * 16, active2);
        second_pool(active2, a->features.values + row * FEATURES);
    }
}

INLINE void backward_rows(const struct backward *a) {
    ALIGNED float padded[TALL * WIDE], sums[ACTIVE2], below[HIDDEN1 + 16], lines[POOLED][5][LINE] = {0};
    for (int64_t row = 0; row < a->image_of.count; row++) {
        const int64_t unit = row / a->rows_of_unit, image = a->image_of.values[row];
        if (image < 0) continue;
        const float *active1 = a->kept.values + row * KEPT, *hidden = active1 + ACTIVE1;
        second_unpool(a->features.values + row * FEATURES, hidden + HIDDEN1, sums, a->bias2.values + unit * 16);
        second_filters(hidden, sums, a->filters2.values + unit * WEIGHT2);
        second_backward(sums, a->turned2.values + a->model_of.values[row] * TURNED2, lines, below);
        pad_image(a->images.values + image * IMAGE, padded);
        first_filters(padded, active1, below, a->weight1.values + unit * WEIGHT1,
                      a->bias1.values + unit * FILTERS1);
    }
}

/* Both passes by one instruction set; what they inline is compiled anew for each. */
#define BY(path, TARGET)                                                                \
    static TARGET void forward_##path(const struct forward *a) { forward_rows(a); } \
    static TARGET void backward_##path(const struct backward *a) { backward_rows(a); }
BY(baseline, ) /* of the processor family: on ARM with NEON */
#if BUILDS_AVX
BY(avx2, TARGET_AVX2)
BY(avx512, TARGET_AVX512)
#endif

static enum status check_rows(struct floats images, struct integers image_of, struct integers model_of,
                              int64_t models) {
    const int64_t num_images = images.count / IMAGE;
    REQUIRE(FITS(images, PRODUCT(num_images, IMAGE)));
    REQUIRE(FITS(image_of, image_of.count));
    REQUIRE(FITS(model_of, image_of.count));
    for (int64_t row = 0; row < image_of.count; row++)
        if (image_of.values[row] < -1 || image_of.values[row] >= num_images) return OUT_OF_RANGE;
    REQUIRE(within(model_of, models));
    return OK;
}

int32_t lenet_version(void) { return LENET_VERSION; }

/* Numbers in a vector; -1: the path is not there, in this build or on this processor. */
int32_t lenet_lanes(int32_t path) { return runs(path) ? (int32_t)(sizeof(vector) / sizeof(float)) : -1; }

int32_t lenet_forward(int32_t path, struct floats images, struct integers image_of, struct integers model_of,
                      struct floats weight1, struct floats bias1, struct floats filters2, struct floats bias2,
                      struct floats kept, struct floats features) {
    const int64_t rows = image_of.count, models = bias2.count / 16;
    if (!runs(path)) return UNSUPPORTED;
    REQUIRE(FITS(weight1, PRODUCT(models, WEIGHT1)));
    REQUIRE(FITS(bias1, PRODUCT(models, FILTERS1)));
    REQUIRE(FITS(filters2, PRODUCT(models, WEIGHT2)));
    REQUIRE(FITS(bias2, PRODUCT(models, 16)));
    REQUIRE(FITS(kept, PRODUCT(rows, KEPT)));
    REQUIRE(FITS(features, PRODUCT(rows, FEATURES)));
    REQUIRE(check_rows(images, image_of, model_of, models));
    const struct forward arguments = {images, image_of, model_of, weight1, bias1, filters2,
                                      bias2,  kept,     features};
#if BUILDS_AVX
    if (path == AVX2) return forward_avx2(&arguments), OK;
    if (path == AVX512) return forward_avx512(&arguments), OK;
#endif
    return forward_baseline(&arguments), OK;
}

/* Adds each row's gradients to those of its unit, whose rows follow each other. */
int32_t lenet_backward(int32_t path, struct floats images, struct integers image_of, struct integers model_of,
                       int64_t rows_of_unit, struct floats turned2, struct floats kept, struct floats features,
                       struct floats weight1, struct floats bias1, struct floats filters2,
                       struct floats bias2) {
    const int64_t rows = image_of.count, models = turned2.count / TURNED2;
    if (!runs(path)) return UNSUPPORTED;
    if (rows < 0 || rows_of_unit < 1 || rows % rows_of_unit != 0) return WRONG_SIZE;
    const int64_t units = rows / rows_of_unit;
    REQUIRE(FITS(turned2, PRODUCT(models, TURNED2)));
    REQUIRE(FITS(kept, PRODUCT(rows, KEPT)));
    REQUIRE(FITS(features, PRODUCT(rows, FEATURES)));
    REQUIRE(FITS(weight1, PRODUCT(units, WEIGHT1)));
    REQUIRE(FITS(bias1, PRODUCT(units, FILTERS1)));
    REQUIRE(FITS(filters2, PRODUCT(units, WEIGHT2)));
    REQUIRE(FITS(bias2, PRODUCT(units, 16)));
    REQUIRE(check_rows(images, image_of, model_of, models));
    const struct backward arguments = {images,   image_of, model_of, rows_of_unit, turned2, kept,
                                       features, weight1,  bias1,    filters2,     bias2};
#if BUILDS_AVX
    if (path == AVX2) return backward_avx2(&arguments), OK;
    if (path == AVX512) return backward_avx512(&arguments), OK;
#endif
    return backward_baseline(&arguments), OK;
}
