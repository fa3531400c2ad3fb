/* Sums for which PyTorch reads memory several times, taken in one pass; units' filters. fused.py calls them.
 *
 * A performance setting: each has its equal in PyTorch, which the tests compare it with and which is used
 * where no compiler was at hand. Threads share out rows, and each number is summed by one thread in a fixed
 * order, so that results do not depend on the number of threads. Values are added in float over short
 * stretches, the stretches in double, or in float where they add up to a gradient that is stored as float.
 * Images are (rows, positions, channels): PyTorch's channels last.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

enum { POSITIONS = 64, CHANNELS = 64, VALUES = 256 }; /* of a stretch, of a block, of a stretch of a filter */

int fused_version(void) { return 2; } /* one more whenever arguments change; fused.py knows it too */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Sums over positions of g and of g * (x - centre), for a block of channels. */
VECTORISED static void block_sums(const float *restrict g, const float *restrict x,
                                  const float *restrict centre, size_t positions, size_t stride,
                                  size_t channels, double *restrict sums, double *restrict products) {
    for (size_t c = 0; c < channels; c++) sums[c] = products[c] = 0;
    for (size_t first = 0; first < positions; first += POSITIONS) {
        float s[CHANNELS] = {0}, p[CHANNELS] = {0};
        size_t last = least(first + POSITIONS, positions);
        for (size_t t = first; t < last; t++) {
            const float *gt = g + t * stride, *xt = x + t * stride;
            if (channels == CHANNELS) /* the usual case, of a length the compiler knows */
                for (size_t c = 0; c < CHANNELS; c++) s[c] += gt[c], p[c] += gt[c] * (xt[c] - centre[c]);
            else
                for (size_t c = 0; c < channels; c++) s[c] += gt[c], p[c] += gt[c] * (xt[c] - centre[c]);
        }
        for (size_t c = 0; c < channels; c++) sums[c] += s[c], products[c] += p[c];
    }
}

static void row_sums(const float *g, const float *x, const float *centre, size_t positions, size_t channels,
                     double *sums, double *products) {
    for (size_t c = 0; c < channels; c += CHANNELS)
        block_sums(g + c, x + c, centre + c, positions, channels, least(CHANNELS, channels - c), sums + c,
                   products + c);
}

/* (rows, channels): sums over positions of g and of g * x. */
void channel_sums(const float *g, const float *x, size_t rows, size_t positions, size_t channels, float *sums,
                  float *products) {
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        double s[channels], p[channels];
        float centre[channels];
        for (size_t c = 0; c < channels; c++) centre[c] = 0;
        size_t start = row * positions * channels;
        row_sums(g + start, x + start, centre, positions, channels, s, p);
        for (size_t c = 0; c < channels; c++) {
            sums[row * channels + c] = (float)s[c];
            products[row * channels + c] = (float)p[c];
        }
    }
}

VECTORISED static void combine(const float *restrict g, const float *restrict x, const float *restrict centre,
                               size_t positions, size_t channels, const float *restrict a,
                               const float *restrict b, const float *restrict c, float *restrict result) {
    for (size_t t = 0; t < positions; t++)
        for (size_t i = 0; i < channels; i++) {
            size_t k = t * channels + i;
            result[k] = a[i] * g[k] + (b[i] * (x[k] - centre[i]) + c[i]);
        }
}

/* Backward pass of group norm: the input's gradient, and each row's gradients of scale and shift.
 *
 * With x_hat = (x - m) r and S, P the sums of w g and w g (x - m) over a group of n values,
 *     dx = r w g - (x - m) P r^3 / n - S r / n,   d scale = sum of g x_hat,   d shift = sum of g.
 */
void group_norm_backward(const float *g, const float *x, const float *mean, const float *inverse,
                         const float *weight, size_t rows, size_t positions, size_t channels, size_t groups,
                         float *gradient, float *scale, float *shift) {
    size_t width = channels / groups;
    double n = (double)width * (double)positions;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        double s[channels], p[channels];
        float centre[channels], a[channels], b[channels], c[channels];
        size_t start = row * positions * channels;
        for (size_t i = 0; i < channels; i++) centre[i] = mean[row * groups + i / width];
        row_sums(g + start, x + start, centre, positions, channels, s, p);
        for (size_t group = 0; group < groups; group++) {
            double r = inverse[row * groups + group], S = 0, P = 0;
            size_t first = group * width;
            for (size_t i = first; i < first + width; i++) S += weight[i] * s[i], P += weight[i] * p[i];
            for (size_t i = first; i < first + width; i++) {
                a[i] = (float)(r * weight[i]);
                b[i] = (float)(-P * r * r * r / n);
                c[i] = (float)(-S * r / n);
                scale[row * channels + i] = (float)(p[i] * r);
                shift[row * channels + i] = (float)s[i];
            }
        }
        combine(g + start, x + start, centre, positions, channels, a, b, c, gradient + start);
    }
}

VECTORISED static void add_moments(const float *restrict v, const float *restrict u, size_t length,
                                   double *restrict total) {
    for (size_t first = 0; first < length; first += VALUES) {
        size_t last = least(first + VALUES, length);
        float squares = 0, sum = 0, along = 0;
#pragma omp simd reduction(+ : squares, sum, along)
        for (size_t i = first; i < last; i++)
            squares += v[i] * v[i], sum += v[i], along += v[i] * u[i];
        total[0] += squares, total[1] += sum, total[2] += along;
    }
}

/* (3, units, filters): of each filter v the sum of squares, the sum, and the product with its direction u.
 * A filter consists of `parts` pieces of `length` values; those of one unit lie `apart` from each other. */
void filter_moments(const float *values, const float *directions, size_t parts, size_t apart, size_t units,
                    size_t filters, size_t length, double *result) {
    size_t count = units * filters;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < count; row++) {
        double total[3] = {0, 0, 0};
        for (size_t part = 0; part < parts; part++)
            add_moments(values + part * apart + row * length,
                        directions + (part * filters + row % filters) * length, length, total);
        for (size_t i = 0; i < 3; i++) result[i * count + row] = total[i];
    }
}

/* ---- Each unit's own gradient of a convolution's filters ----------------------------------------------- */

/* The fields are those that fused.py writes, in this order. */
struct convolution {
    int64_t units, views, height, width, in_height, in_width, filters, channels;
    int64_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left;
};

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12

#define WIDE __attribute__((target("arch=x86-64-v4")))
typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16, TALL = 6, BROAD = 4, ROWS = 4, BLOCK = 32, CLASSES = 128, NEAR = 256 }; /* 6 x 4 vectors of sums fill the registers */

int has_unit_filters(void) { return __builtin_cpu_supports("x86-64-v4"); }

/* The range of output positions whose input, `offset` away, lies inside. */
static void inside(int64_t count, int64_t size, int64_t stride, int64_t offset, int64_t *first, int64_t *last) {
    *first = offset < 0 ? (-offset + stride - 1) / stride : 0;
    *last = count;
    while (*last > *first && (*last - 1) * stride + offset >= size) --*last;
}

/* Add to result[f, c] the sum of g[f] * x[c] at one offset of the kernel, over the lines from `first` to `last`
 * of all views, for `tall` filters and `broad` vectors of channels but for the first channels that are `known`. */
static inline __attribute__((always_inline)) WIDE void tile(const struct convolution *k, const float *g,
                                                            const float *x, int64_t first, int64_t last,
                                                            int64_t tap_y, int64_t tap_x, int64_t known,
                                                            float *result, const int tall, const int broad) {
    int64_t offset_y = tap_y * k->dilation_y - k->top, offset_x = tap_x * k->dilation_x - k->left;
    int64_t filter = k->kernel_height * k->kernel_width * k->channels, top, bottom, left, right;
    inside(k->height, k->in_height, k->stride_y, offset_y, &top, &bottom);
    inside(k->width, k->in_width, k->stride_x, offset_x, &left, &right);
    lanes sums[TALL][BROAD];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++)
            sums[i][j] = (lanes){0};
    for (int64_t at = first; at < last; at++) {
        int64_t view = at / k->height, line = at % k->height;
        if (line < top || line >= bottom) continue;
        int64_t row = view * k->in_height + line * k->stride_y + offset_y;
        const float *gt = g + (at * k->width + left) * k->filters;
        const float *xt = x + (row * k->in_width + left * k->stride_x + offset_x) * k->channels;
        for (int64_t t = left; t < right; t++, gt += k->filters, xt += k->stride_x * k->channels) {
            lanes values[BROAD];
            for (int j = 0; j < broad; j++) values[j] = *(const lanes *)(xt + j * LANES);
            for (int i = 0; i < tall; i++)
                for (int j = 0; j < broad; j++) sums[i][j] += values[j] * gt[i];
        }
    }
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) {
            float *place = result + i * filter + j * LANES;
            if (known == 0)
                *(lanes *)place = first ? *(lanes *)place + sums[i][j] : sums[i][j];
            else
                for (int64_t l = known; l < LANES; l++) place[l] = first ? place[l] + sums[i][j][l] : sums[i][j][l];
        }
}

/* The compiler must know a tile's size to keep it in registers. */
#define CASE(T, B) \
    case (T) * 8 + (B): tile(k, g + f, x + c, first, last, tap_y, tap_x, known, place, T, B); break;
#define CASES(T) CASE(T, 1) CASE(T, 2) CASE(T, 3) CASE(T, 4)

/* Add a stretch of lines to one unit's filters, (filters, kernel height, kernel width, channels). */
static WIDE void add_lines(const struct convolution *k, const float *g, const float *x, int64_t first,
                           int64_t last, float *result) {
    int64_t taps = k->kernel_height * k->kernel_width, broad, known = 0;
    for (int64_t c = 0; c < k->channels; c += broad * LANES) {
        broad = (int64_t)least(BROAD, (size_t)(k->channels - c) / LANES);
        if (broad == 0) { /* what is left is less than a vector: take channels before it along */
            known = LANES - (k->channels - c);
            c -= known, broad = 1;
        }
        for (int64_t f = 0; f < k->filters; f += TALL)
            for (int64_t tap = 0; tap < taps; tap++) {
                int64_t tap_y = tap / k->kernel_width, tap_x = tap % k->kernel_width;
                float *place = result + (f * taps + tap) * k->channels + c;
                switch (least(TALL, (size_t)(k->filters - f)) * 8 + (size_t)broad) {
                    CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6)
                }
            }
    }
}

/* The sum of g over positions, for a block of filters. */
static WIDE void block_shifts(const float *restrict g, int64_t positions, int64_t stride, int64_t filters,
                              float *restrict result) {
    double total[CHANNELS] = {0};
    for (int64_t first = 0; first < positions; first += POSITIONS) {
        float sums[CHANNELS] = {0};
        for (int64_t t = first; t < first + POSITIONS && t < positions; t++)
            for (int64_t f = 0; f < filters; f++) sums[f] += g[t * stride + f];
        for (int64_t f = 0; f < filters; f++) total[f] += sums[f];
    }
    for (int64_t f = 0; f < filters; f++) result[f] = (float)total[f];
}

/* Each unit's gradient of the filters, and while it is in cache its moments (3, units, filters); the
 * gradient of the bias, (units, filters). */
void unit_filters(const struct convolution *k, const float *g, const float *x, const float *directions,
                  float *result, double *moments, float *shifts) {
    int64_t positions = k->views * k->height * k->width;
    int64_t outputs = positions * k->filters, lines = k->views * k->height;
    int64_t some = k->width < NEAR ? NEAR / k->width : 1; /* so many lines stay in cache, and their sum keeps its digits */
    int64_t inputs = k->views * k->in_height * k->in_width * k->channels;
    int64_t length = k->kernel_height * k->kernel_width * k->channels, count = k->units * k->filters;
#pragma omp parallel for schedule(static)
    for (int64_t unit = 0; unit < k->units; unit++) {
        float *own = result + unit * k->filters * length;
        for (int64_t first = 0; first < lines; first += some)
            add_lines(k, g + unit * outputs, x + unit * inputs, first,
                      (int64_t)least((size_t)(first + some), (size_t)lines), own);
        for (int64_t f = 0; f < k->filters; f++) {
            double total[3] = {0, 0, 0};
            add_moments(own + f * length, directions + f * length, (size_t)length, total);
            for (int i = 0; i < 3; i++) moments[i * count + unit * k->filters + f] = total[i];
        }
        for (int64_t f = 0; f < k->filters; f += CHANNELS)
            block_shifts(g + unit * outputs + f, positions, k->filters, (int64_t)least(CHANNELS, k->filters - f),
                         shifts + unit * k->filters + f);
    }
}

/* out[r, i] = x[r] . w[i] for a few rows and classes; `length` numbers each. */
static inline __attribute__((always_inline)) WIDE void dots(const float *const *x, const float *w, int64_t length,
                                                            float *out, const int rows, const int tall) {
    lanes sums[ROWS][TALL];
    int64_t c = 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < tall; i++) sums[r][i] = (lanes){0};
    for (; c + LANES <= length; c += LANES) {
        lanes values[ROWS];
        for (int r = 0; r < rows; r++) values[r] = *(const lanes *)(x[r] + c);
        for (int i = 0; i < tall; i++) {
            lanes weights = *(const lanes *)(w + i * length + c);
            for (int r = 0; r < rows; r++) sums[r][i] += values[r] * weights;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < tall; i++) {
            float total = 0;
            for (int l = 0; l < LANES; l++) total += sums[r][i][l];
            for (int64_t l = c; l < length; l++) total += x[r][l] * w[i * length + l];
            out[r * CLASSES + i] = total;
        }
}

/* result[i, c] += sum over rows of f[r, i] * x[r, c], for `tall` classes and `broad` vectors from c on. */
static inline __attribute__((always_inline)) WIDE void outer(const float *const *x, int64_t c, const float *f,
                                                             int64_t rows, int64_t length, float *result,
                                                             const int tall, const int broad) {
    lanes sums[TALL][BROAD];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) sums[i][j] = (lanes){0};
    for (int64_t r = 0; r < rows; r++) {
        lanes values[BROAD];
        for (int j = 0; j < broad; j++) values[j] = *(const lanes *)(x[r] + c + j * LANES);
        for (int i = 0; i < tall; i++)
            for (int j = 0; j < broad; j++) sums[i][j] += values[j] * f[r * CLASSES + i];
    }
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) *(lanes *)(result + i * length + c + j * LANES) += sums[i][j];
}

#define DOTS(R, T) \
    case (R) * 8 + (T): dots(x + r, w + i * length, length, out + r * CLASSES + i, R, T); break;
#define ALL_DOTS(R) DOTS(R, 1) DOTS(R, 2) DOTS(R, 3) DOTS(R, 4) DOTS(R, 5) DOTS(R, 6)
#define OUTER(T, B) \
    case (T) * 8 + (B): outer(x, c, f + i, rows, length, result + i * length, T, B); break;
#define ALL_OUTER(T) OUTER(T, 1) OUTER(T, 2) OUTER(T, 3) OUTER(T, 4)

/* (rows, CLASSES): the products of all rows x with all w. */
static WIDE void all_dots(const float *const *x, const float *w, int64_t rows, int64_t length, int64_t classes,
                          float *out) {
    for (int64_t r = 0; r < rows; r += ROWS)
        for (int64_t i = 0; i < classes; i += TALL)
            switch (least(ROWS, (size_t)(rows - r)) * 8 + least(TALL, (size_t)(classes - i))) {
                ALL_DOTS(1) ALL_DOTS(2) ALL_DOTS(3) ALL_DOTS(4)
            }
}

/* (classes, length): add the products of f[r] and x[r] over all rows. */
static WIDE void add_outer(const float *const *x, const float *f, int64_t rows, int64_t length, int64_t classes,
                           float *result) {
    int64_t broad, whole = length / LANES * LANES;
    for (int64_t c = 0; c < whole; c += broad * LANES) {
        broad = (int64_t)least(BROAD, (size_t)(whole - c) / LANES);
        for (int64_t i = 0; i < classes; i += TALL)
            switch (least(TALL, (size_t)(classes - i)) * 8 + (size_t)broad) {
                ALL_OUTER(1) ALL_OUTER(2) ALL_OUTER(3) ALL_OUTER(4) ALL_OUTER(5) ALL_OUTER(6)
            }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < classes; i++)
            for (int64_t c = whole; c < length; c++) result[i * length + c] += f[r * CLASSES + i] * x[r][c];
}

/* The logits of one row become p - y; returns the loss. */
static WIDE float residual_of(float *logits, const float *bias, int64_t classes, int64_t target) {
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < classes; i++) {
        logits[i] += bias[i];
        if (logits[i] > largest) largest = logits[i];
    }
    float at_target = logits[target] - largest;
    for (int64_t i = 0; i < classes; i++) total += logits[i] = expf(logits[i] - largest);
    for (int64_t i = 0; i < classes; i++) logits[i] /= total;
    logits[target] -= 1;
    return logf(total) - at_target;
}

/* The clipped sum of a softmax regression over some rows, in one pass over memory. A row's gradient has the norm
 * |p - y| * sqrt(square), and counts with `bound` over it where that is below 1; without a finite norm it counts
 * as zero. `chosen` numbers the rows, or is null for the first ones. Adds to `weights` and `biases`. */
WIDE void head_sums(const float *rows, const int64_t *chosen, const int64_t *targets, const double *squares,
                    const float *w, const float *bias, const double *bound, int64_t count, int64_t length,
                    int64_t classes, float *weights, float *biases, double *norms, float *losses) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        const float *x[BLOCK];
        float f[BLOCK * CLASSES];
        int64_t some = (int64_t)least(BLOCK, (size_t)(count - first)), counted = 0;
        for (int64_t r = 0; r < some; r++) x[r] = rows + (chosen ? chosen[first + r] : first + r) * length;
        all_dots(x, w, some, length, classes, f);
        for (int64_t r = 0; r < some; r++) {
            float *own = f + r * CLASSES;
            losses[first + r] = residual_of(own, bias, classes, targets[first + r]);
            double square = 0;
            for (int64_t i = 0; i < classes; i++) square += (double)own[i] * own[i];
            double norm = norms[first + r] = sqrt(square * squares[first + r]);
            if (!isfinite(norm)) continue;
            float factor = norm > *bound ? (float)(*bound / norm) : 1;
            x[counted] = x[r]; /* rows that count move up */
            for (int64_t i = 0; i < classes; i++) biases[i] += f[counted * CLASSES + i] = factor * own[i];
            counted++;
        }
        add_outer(x, f, counted, length, classes, weights);
    }
}

#else

int has_unit_filters(void) { return 0; }
void head_sums(const float *rows, const int64_t *chosen, const int64_t *targets, const double *squares,
               const float *w, const float *bias, const double *bound, int64_t count, int64_t length,
               int64_t classes, float *weights, float *biases, double *norms, float *losses) {
    (void)rows, (void)chosen, (void)targets, (void)squares, (void)w, (void)bias, (void)bound, (void)count;
    (void)length, (void)classes, (void)weights, (void)biases, (void)norms, (void)losses;
}
void unit_filters(const struct convolution *k, const float *g, const float *x, const float *directions,
                  float *result, double *moments, float *shifts) {
    (void)k, (void)g, (void)x, (void)directions, (void)result, (void)moments, (void)shifts;
}

#endif
