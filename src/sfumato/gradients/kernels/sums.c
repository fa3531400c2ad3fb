/* Sums over positions, group norm's backward pass, and moments of filters; kernels.h says what they are. */
#include <stdlib.h>

#include "checks.h"
#include "loops.h"

int32_t channel_sums(int32_t path, struct floats g, struct floats x, int64_t rows, int64_t positions,
                     int64_t channels, struct floats sums, struct floats products) {
    const struct loops *loops = loops_of(path);
    if (loops == NULL) return UNSUPPORTED;
    int64_t values = PRODUCT(rows, positions, channels), results = PRODUCT(rows, channels);
    REQUIRE(FITS(g, values));
    REQUIRE(FITS(x, values));
    REQUIRE(FITS(sums, results));
    REQUIRE(FITS(products, results));
    static const float centre[CHANNELS] = {0};
    IN_THREADS
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < channels; c += CHANNELS) {
            int64_t start = row * positions * channels + c, width = least(CHANNELS, channels - c);
            double s[CHANNELS], p[CHANNELS];
            loops->images.block_sums(g.values + start, x.values + start, centre, positions, channels, width, s, p);
            for (int64_t i = 0; i < width; i++) {
                sums.values[row * channels + c + i] = (float)s[i];
                products.values[row * channels + c + i] = (float)p[i];
            }
        }
    return OK;
}

/* One row of group_norm_backward: its arrays, and its numbers of each channel. */
struct norm_row {
    const char *g, *x;
    const float *mean, *inverse, *weight;
    int64_t positions, channels, groups;
    char *gradient;
    float *scale, *shift;
    double *s, *p;
    float *centre, *a, *b, *c;
};

/* With x_hat = (x - m) r and S, P the sums of w g and w g (x - m) over a group of n values,
 *     dx = r w g - (x - m) P r^3 / n - S r / n,   d scale = sum of g x_hat,   d shift = sum of g. */
static void norm_row_backward(const struct image_loops *loops, const struct norm_row *k, size_t item) {
    int64_t width = k->channels / k->groups;
    double n = (double)width * (double)k->positions;
    for (int64_t i = 0; i < k->channels; i++) k->centre[i] = k->mean[i / width];
    for (int64_t c = 0; c < k->channels; c += CHANNELS)
        loops->block_sums(k->g + (size_t)c * item, k->x + (size_t)c * item, k->centre + c, k->positions, k->channels,
                          least(CHANNELS, k->channels - c), k->s + c, k->p + c);
    for (int64_t group = 0; group < k->groups; group++) {
        double r = k->inverse[group], S = 0, P = 0;
        int64_t first = group * width;
        for (int64_t i = first; i < first + width; i++)
            S += k->weight[i] * k->s[i], P += k->weight[i] * k->p[i];
        for (int64_t i = first; i < first + width; i++) {
            k->a[i] = (float)(r * k->weight[i]);
            k->b[i] = (float)(-P * r * r * r / n);
            k->c[i] = (float)(-S * r / n);
            k->scale[i] = (float)(k->p[i] * r);
            k->shift[i] = (float)k->s[i];
        }
    }
    loops->combine(k->g, k->x, k->centre, k->positions, k->channels, k->a, k->b, k->c, k->gradient);
}

/* Room for a row's numbers of each channel; false where there is no memory. `free(k->s)` gives it back. */
static int make_room(struct norm_row *k) {
    size_t channels = (size_t)k->channels;
    k->s = malloc(channels * (2 * sizeof(double) + 4 * sizeof(float)) + 1);
    if (k->s == NULL) return 0;
    k->p = k->s + channels;
    k->centre = (float *)(k->p + channels);
    k->a = k->centre + channels, k->b = k->a + channels, k->c = k->b + channels;
    return 1;
}

/* The rows of a backward pass of group norm, whose sizes were checked; its numbers have `item` bytes. */
static int32_t norm_backward(const struct image_loops *loops, const struct norm_row *all, int64_t rows,
                             size_t item) {
    int32_t status = OK;
    IN_THREADS
    for (int64_t row = 0; row < rows; row++) {
        int64_t channel = row * all->channels, group = row * all->groups;
        size_t start = (size_t)(row * all->positions * all->channels) * item;
        struct norm_row k = *all;
        k.g += start, k.x += start, k.gradient += start;
        k.mean += group, k.inverse += group, k.scale += channel, k.shift += channel;
        if (make_room(&k))
            norm_row_backward(loops, &k, item);
        else
            status = NO_MEMORY; /* whichever threads write, they write the same */
        free(k.s);
    }
    return status;
}

/* The two functions differ in the type of their images only. */
#define GROUP_NORM_BACKWARD(name, IMAGES, loops_)                                                            \
    int32_t name(int32_t path, IMAGES g, IMAGES x, struct floats mean, struct floats inverse,                \
                 struct floats weight, int64_t rows, int64_t positions, int64_t channels, int64_t groups,    \
                 IMAGES gradient, struct floats scale, struct floats shift) {                                \
        const struct loops *loops = loops_of(path);                                                          \
        if (loops == NULL) return UNSUPPORTED;                                                               \
        if (groups < 1 || channels < groups || channels % groups != 0) return WRONG_SIZE;                    \
        int64_t values = PRODUCT(rows, positions, channels), results = PRODUCT(rows, channels);              \
        REQUIRE(PRODUCT(channels, 4) < 0 ? WRONG_SIZE : OK); /* the room of a row, in doubles */             \
        REQUIRE(FITS(g, values));                                                                            \
        REQUIRE(FITS(x, values));                                                                            \
        REQUIRE(FITS(mean, PRODUCT(rows, groups)));                                                          \
        REQUIRE(FITS(inverse, PRODUCT(rows, groups)));                                                       \
        REQUIRE(FITS(weight, channels));                                                                     \
        REQUIRE(FITS(gradient, values));                                                                     \
        REQUIRE(FITS(scale, results));                                                                       \
        REQUIRE(FITS(shift, results));                                                                       \
        struct norm_row all = {                                                                              \
            .g = (const char *)g.values, .x = (const char *)x.values, .mean = mean.values,                   \
            .inverse = inverse.values, .weight = weight.values, .positions = positions,                      \
            .channels = channels, .groups = groups, .gradient = (char *)gradient.values,                     \
            .scale = scale.values, .shift = shift.values,                                                    \
        };                                                                                                   \
        return norm_backward(&loops->loops_, &all, rows, sizeof *g.values);                                  \
    }

GROUP_NORM_BACKWARD(group_norm_backward, struct floats, images)
GROUP_NORM_BACKWARD(low_group_norm_backward, struct halves, low_images)

static void add_weighted_rows(const struct image_loops *loops, const char *values, const float *factors,
                              int64_t units, int64_t length, double *total, size_t item) {
    IN_THREADS
    for (int64_t block = 0; block < (length + WEIGHTED - 1) / WEIGHTED; block++) {
        int64_t first = block * WEIGHTED, count = least(WEIGHTED, length - first);
        for (int64_t unit = 0; unit < units; unit += FEW)
            loops->add_weighted(values + (size_t)(unit * length + first) * item, factors + unit,
                                least(FEW, units - unit), length, count, total + first);
    }
}

#define WEIGHTED_SUM(name, ROWS, loops_)                                                                     \
    int32_t name(int32_t path, ROWS values, struct floats factors, int64_t units, int64_t length,            \
                 struct doubles total) {                                                                     \
        const struct loops *loops = loops_of(path);                                                          \
        if (loops == NULL) return UNSUPPORTED;                                                               \
        REQUIRE(FITS(values, PRODUCT(units, length)));                                                       \
        REQUIRE(FITS(factors, units));                                                                       \
        REQUIRE(FITS(total, length));                                                                        \
        add_weighted_rows(&loops->loops_, (const char *)values.values, factors.values, units, length,        \
                          total.values, sizeof *values.values);                                              \
        return OK;                                                                                           \
    }

WEIGHTED_SUM(weighted_sum, struct floats, images)
WEIGHTED_SUM(low_weighted_sum, struct halves, low_images)

int32_t filter_moments(int32_t path, struct floats values, struct floats directions, int64_t parts,
                       int64_t apart, int64_t units, int64_t filters, int64_t length, struct doubles moments) {
    const struct loops *loops = loops_of(path);
    if (loops == NULL) return UNSUPPORTED;
    int64_t count = PRODUCT(units, filters), piece = PRODUCT(units, filters, length);
    int64_t before = parts > 0 ? PRODUCT(parts - 1, apart) : -1; /* where the last part begins */
    if (before < 0 || piece < 0) return WRONG_SIZE;
    REQUIRE(FITS(values, piece == 0 ? 0 : before + piece));
    REQUIRE(FITS(directions, PRODUCT(parts, filters, length)));
    REQUIRE(FITS(moments, PRODUCT(3, units, filters)));
    IN_THREADS
    for (int64_t row = 0; row < count; row++) {
        double total[3] = {0, 0, 0};
        for (int64_t part = 0; part < parts; part++)
            loops->add_moments(values.values + part * apart + row * length,
                               directions.values + (part * filters + row % filters) * length, length, total);
        for (int64_t i = 0; i < 3; i++) moments.values[i * count + row] = total[i];
    }
    return OK;
}
