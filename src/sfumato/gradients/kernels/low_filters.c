/* Each unit's own gradient of a convolution's filters from images in bfloat16; kernels.h says what is returned.
 *
 * The processor multiplies pairs of bfloat16 and adds both products to a float; here a pair is two neighbouring
 * positions of a line. So both images of a unit are laid out in pairs, the inputs once for each column of the
 * kernel, with zeros where a position lies outside, and then a line of the kernel meets one piece of memory.
 */
#include <stdlib.h>
#include <string.h>

#include "convolution.h"

#if BUILDS_PAIRS
#include <immintrin.h>

#define TARGET TARGET_PAIRS
#define LANES 16
#define TALL 6
#define BROAD 4
#include "tiles.h"

enum { UNITS = 16, CACHED = 200000 }; /* units laid out at once, and values of theirs that stay in cache */

/* Lines of a unit that are summed at once, whole views or lines of one view; and its images in pairs. */
struct stretch {
    const struct convolution *k;
    int64_t view, views, first, last; /* the views, and which lines of the output in each of them */
    int64_t pairs;                    /* of a line */
    int64_t lines;                    /* of the input, beginning at the same residue of the stride */
    int rounds;                       /* sums are rounded to bfloat16 before a factor meets them */
    uint16_t *g;                      /* (blocks of TALL filters, views, lines of the output, pairs, filters, 2) */
    uint16_t *x; /* (blocks of channels, columns of the kernel, views, residues, lines, pairs, channels, 2) */
};

static int64_t reach(const struct convolution *k) { return (k->kernel_height - 1) * k->dilation_y / k->stride_y; }

static int64_t whole(int64_t channels) { return (channels + LANES - 1) / LANES * LANES; }

static int64_t g_values(const struct stretch *s) {
    return PRODUCT(s->views, s->last - s->first, s->pairs, s->k->filters, 2);
}

/* Values of x for so many channels of one column of the kernel. */
static int64_t x_values(const struct stretch *s, int64_t channels) {
    return PRODUCT(s->views, s->k->stride_y, s->lines, s->pairs, channels, 2);
}

/* The first stretch of a unit; the others are not larger. */
static struct stretch first_stretch(const struct convolution *k) {
    int64_t positions = PRODUCT(k->height, k->width);
    struct stretch s = {.k = k, .views = 1, .last = k->height, .pairs = (k->width + 1) / 2};
    if (positions > STRETCH)
        s.last = least(k->height, k->width < STRETCH ? STRETCH / k->width : 1);
    else
        s.views = least(k->views, STRETCH / positions);
    s.lines = s.last + reach(k);
    return s;
}

static int is_whole(const struct stretch *s) { return s->views == s->k->views && s->last == s->k->height; }

/* Moves on to the next stretch; false after the last. */
static int next_stretch(struct stretch *s) {
    int64_t lines = s->lines - reach(s->k);
    s->first = s->last;
    if (s->first == s->k->height) s->first = 0, s->view += s->views;
    s->last = least(s->first + lines, s->k->height);
    s->views = least(s->views, s->k->views - s->view);
    return s->view < s->k->views;
}

/* out[c] = (a[c], b[c]), where an absent one is zeros; `count` channels, and zeros up to `room`. */
static TARGET void lay_pairs(const uint16_t *restrict a, const uint16_t *restrict b, int64_t count, int64_t room,
                             uint16_t *restrict out) {
    if (a != NULL && b != NULL)
        for (int64_t c = 0; c < count; c++) out[2 * c] = a[c], out[2 * c + 1] = b[c];
    else
        for (int64_t c = 0; c < count; c++)
            out[2 * c] = a == NULL ? 0 : a[c], out[2 * c + 1] = b == NULL ? 0 : b[c];
    for (int64_t c = count; c < room; c++) out[2 * c] = out[2 * c + 1] = 0;
}

/* A few filters of two positions as pairs, one after the other. */
static inline TARGET void lay_few(const uint16_t *a, const uint16_t *b, int64_t count, uint16_t *out) {
    __mmask8 wanted = (__mmask8)((1 << count) - 1);
    __m128i first = _mm_maskz_loadu_epi16(wanted, a);
    __m128i second = b == NULL ? _mm_setzero_si128() : _mm_maskz_loadu_epi16(wanted, b);
    __m256i both = _mm256_set_m128i(_mm_unpackhi_epi16(first, second), _mm_unpacklo_epi16(first, second));
    _mm256_mask_storeu_epi32(out, wanted, both);
}

static TARGET void lay_out_g(const struct stretch *s, const uint16_t *g) {
    const struct convolution *k = s->k;
    uint16_t *out = s->g;
    for (int64_t f = 0; f < k->filters; f += TALL) {
        int64_t tall = least(TALL, k->filters - f);
        for (int64_t view = s->view; view < s->view + s->views; view++)
            for (int64_t line = s->first; line < s->last; line++) {
                const uint16_t *from = g + (view * k->height + line) * k->width * k->filters + f;
                for (int64_t t = 0; t < k->width; t += 2, from += 2 * k->filters, out += 2 * tall)
                    lay_few(from, t + 1 < k->width ? from + k->filters : NULL, tall, out);
            }
    }
}

/* One line of the input for one column of the kernel and a block of channels. */
static TARGET void lay_out_line(const struct stretch *s, const uint16_t *x, int64_t tap_x, int64_t channels,
                                int64_t room, uint16_t *out) {
    const struct convolution *k = s->k;
    int64_t offset = tap_x * k->dilation_x - k->left;
    for (int64_t t = 0; t < k->width; t += 2, out += 2 * room) {
        int64_t here = t * k->stride_x + offset, next = here + k->stride_x;
        int is_here = here >= 0 && here < k->in_width;
        int is_next = t + 1 < k->width && next >= 0 && next < k->in_width;
        lay_pairs(is_here ? x + here * k->channels : NULL, is_next ? x + next * k->channels : NULL, channels,
                  room, out);
    }
}

static TARGET void lay_out_x(const struct stretch *s, const uint16_t *x) {
    const struct convolution *k = s->k;
    uint16_t *out = s->x;
    for (int64_t c = 0; c < k->channels; c += BROAD * LANES) {
        int64_t channels = least(BROAD * LANES, k->channels - c), room = whole(channels);
        for (int64_t tap_x = 0; tap_x < k->kernel_width; tap_x++)
            for (int64_t view = s->view; view < s->view + s->views; view++)
                for (int64_t residue = 0; residue < k->stride_y; residue++)
                    for (int64_t line = 0; line < s->lines; line++, out += 2 * room * s->pairs) {
                        int64_t row = (s->first + line) * k->stride_y + residue - k->top;
                        if (row < 0 || row >= k->in_height) continue; /* no tile reads it */
                        const uint16_t *from = x + (view * k->in_height + row) * k->in_width * k->channels + c;
                        lay_out_line(s, from, tap_x, channels, room, out);
                    }
    }
}

static void lay_out(const struct stretch *s, const uint16_t *g, const uint16_t *x) {
    lay_out_g(s, g);
    lay_out_x(s, x);
}

/* Which lines of the output a line of the kernel meets, and where the input's begin. */
struct meeting {
    int64_t top, bottom, residue, from;
};

static struct meeting meeting_of(const struct stretch *s, int64_t tap_y) {
    const struct convolution *k = s->k;
    int64_t offset = tap_y * k->dilation_y;
    struct meeting m = {.residue = offset % k->stride_y, .from = offset / k->stride_y};
    inside(k->height, k->in_height, k->stride_y, offset - k->top, &m.top, &m.bottom);
    m.top = m.top > s->first ? m.top : s->first, m.bottom = least(m.bottom, s->last);
    return m;
}

static inline TARGET __m256i halves_of(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

static inline TARGET __m512 floats_of(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* result[f, c] = the sum of g[f] * x[c] at one offset of the kernel over the stretch, for `tall` filters and
 * `broad` vectors of channels; x is that of its column. With a factor it is that many times the sum, added to what
 * is there. A filter's values lie `apart`. */
TILE pairs_tile(const struct stretch *s, const struct meeting *m, const uint16_t *g, const uint16_t *x,
                float *result, int64_t apart, const float *factor, const int tall, const int broad) {
    int64_t lines = s->last - s->first, step = broad * LANES * 2, top = m->top - s->first;
    __m512 sums[TALL][BROAD];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) sums[i][j] = _mm512_setzero_ps();
    for (int64_t view = 0; view < s->views; view++) {
        const uint16_t *gt = g + (view * lines + top) * s->pairs * tall * 2;
        const uint16_t *xt = x + ((view * s->k->stride_y + m->residue) * s->lines + top + m->from) * s->pairs * step;
        for (int64_t t = (m->bottom - m->top) * s->pairs; t > 0; t--, gt += 2 * tall, xt += step) {
            __m512i values[BROAD];
            for (int j = 0; j < broad; j++) values[j] = _mm512_loadu_si512(xt + j * 2 * LANES);
            for (int i = 0; i < tall; i++) {
                int32_t pair;
                memcpy(&pair, gt + 2 * i, sizeof pair);
                __m512i both = _mm512_set1_epi32(pair);
                for (int j = 0; j < broad; j++)
                    sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)values[j], (__m512bh)both);
            }
        }
    }
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) {
            float *place = result + i * apart + j * LANES;
            if (s->rounds) sums[i][j] = floats_of(halves_of(sums[i][j]));
            if (factor != NULL)
                sums[i][j] = _mm512_fmadd_ps(sums[i][j], _mm512_set1_ps(*factor), _mm512_loadu_ps(place));
            _mm512_storeu_ps(place, sums[i][j]);
        }
}

#define PAIRS_TILE(i, j) pairs_tile(s, &m, g, x, place, apart, factor, i, j)

/* The stretch's sum for a few filters from f on: (filters, kernel height, kernel width, channels of whole
 * vectors). With a factor it is that many times the sum, added to what is there. */
static TARGET void few_filters(const struct stretch *s, int64_t f, float *result, const float *factor) {
    const struct convolution *k = s->k;
    int64_t channels = whole(k->channels), apart = k->kernel_height * k->kernel_width * channels;
    const uint16_t *g = s->g + g_values(s) / k->filters * f;
    for (int64_t tap_y = 0; tap_y < k->kernel_height; tap_y++) {
        const struct meeting m = meeting_of(s, tap_y);
        const uint16_t *x = s->x;
        for (int64_t c = 0; c < channels; c += BROAD * LANES) {
            int64_t room = least(BROAD * LANES, channels - c), column = x_values(s, room);
            for (int64_t tap_x = 0; tap_x < k->kernel_width; tap_x++, x += column) {
                float *place = result + (tap_y * k->kernel_width + tap_x) * channels + c;
                switch (SIZE_OF_TILE(least(TALL, k->filters - f), room / LANES)) { CASES(PAIRS_TILE) }
            }
        }
    }
}

/* One filter's values without the channels that fill up vectors. */
static void close_ranks(const struct convolution *k, float *filter) {
    int64_t channels = whole(k->channels);
    if (channels == k->channels) return;
    for (int64_t tap = 1; tap < k->kernel_height * k->kernel_width; tap++)
        memmove(filter + tap * k->channels, filter + tap * channels, sizeof(float) * (size_t)k->channels);
}

/* The sum of squares of a filter's values, their sum, and their product with u, as add_moments has them, after the
 * values were rounded to bfloat16. If there is a `result` they go there. */
static TARGET void finish_filter(const float *values, const float *u, int64_t length, uint16_t *result,
                                 double *moments) {
    __m512d totals[3] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int64_t first = 0; first < length; first += VALUES) {
        __m512 parts[3] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        int64_t last = least(first + VALUES, length);
        for (int64_t i = first; i < last; i += LANES) {
            __mmask16 there = (__mmask16)(last - i < LANES ? (1 << (last - i)) - 1 : 0xffff);
            __m512 v = _mm512_maskz_loadu_ps(there, values + i);
            __m256i halves = halves_of(v);
            if (result != NULL) _mm256_mask_storeu_epi16(result + i, there, halves);
            v = floats_of(halves);
            parts[0] = _mm512_fmadd_ps(v, v, parts[0]);
            parts[1] = _mm512_add_ps(v, parts[1]);
            parts[2] = _mm512_fmadd_ps(v, _mm512_maskz_loadu_ps(there, u + i), parts[2]);
        }
        for (int n = 0; n < 3; n++) {
            __m256 low = _mm512_castps512_ps256(parts[n]), high = _mm512_extractf32x8_ps(parts[n], 1);
            totals[n] = _mm512_add_pd(totals[n], _mm512_add_pd(_mm512_cvtps_pd(low), _mm512_cvtps_pd(high)));
        }
    }
    for (int n = 0; n < 3; n++) moments[n] = _mm512_reduce_add_pd(totals[n]);
}

static TARGET void low_shifts(const uint16_t *restrict g, int64_t positions, int64_t filters,
                              float *restrict result) {
    for (int64_t first = 0; first < filters; first += CHANNELS) {
        int64_t width = least(CHANNELS, filters - first);
        double total[CHANNELS] = {0};
        for (int64_t start = 0; start < positions; start += POSITIONS) {
            float sums[CHANNELS] = {0};
            for (int64_t t = start; t < least(start + POSITIONS, positions); t++)
                for (int64_t f = 0; f < width; f++) sums[f] += widened(g[t * filters + first + f]);
            for (int64_t f = 0; f < width; f++) total[f] += sums[f];
        }
        for (int64_t f = 0; f < width; f++) result[first + f] = (float)total[f];
    }
}

/* What one unit is given and gives. */
struct unit {
    const uint16_t *g, *x;
    uint16_t *result; /* null: not kept */
    double *moments;  /* (3, count) */
    int64_t count;
    float *shifts;
};

/* A few filters of a unit, complete: rounded, kept if wanted, and their moments. */
static void finish(const struct convolution *k, const struct unit *unit, const float *directions, int64_t f,
                   float *filters) {
    int64_t taps = k->kernel_height * k->kernel_width, length = taps * k->channels;
    for (int64_t i = f; i < least(f + TALL, k->filters); i++, filters += taps * whole(k->channels)) {
        double moments[3];
        close_ranks(k, filters);
        finish_filter(filters, directions + i * length, length,
                      unit->result == NULL ? NULL : unit->result + i * length, moments);
        for (int n = 0; n < 3; n++) unit->moments[n * unit->count + i] = moments[n];
    }
}

/* Values of a unit's images in pairs, and of its filters with channels of whole vectors; -1: too many. */
static int64_t pair_values(const struct stretch *s) {
    int64_t x = PRODUCT(x_values(s, whole(s->k->channels)), s->k->kernel_width), g = g_values(s);
    return x < 0 || g < 0 ? -1 : PRODUCT(x + g, 1);
}

/* The same of another unit, whose pairs lie behind those of the units before it. */
static struct stretch moved(const struct stretch *s, int64_t units) {
    struct stretch other = *s;
    other.g += units * pair_values(s), other.x += units * pair_values(s);
    return other;
}

static int64_t filter_values(const struct convolution *k, int64_t filters) {
    return PRODUCT(filters, k->kernel_height, k->kernel_width, whole(k->channels));
}

/* A unit of several stretches, whose filters are added up one stretch after another. */
static void long_unit(struct stretch s, const struct unit *unit, const float *directions, float *filters) {
    const struct convolution *k = s.k;
    const float one = 1;
    const float *factor = NULL; /* the first stretch overwrites what was there */
    int more;
    do {
        lay_out(&s, unit->g, unit->x);
        struct stretch now = s;
        more = next_stretch(&s);
        for (int64_t f = 0; f < k->filters; f += TALL) {
            float *place = filters + filter_values(k, f);
            few_filters(&now, f, place, factor);
            if (!more) finish(k, unit, directions, f, place);
        }
        factor = &one;
    } while (more);
}

/* Units of one stretch each, filters first: what all units share of them stays in cache. */
static void short_units(const struct stretch *s, const struct unit *units, int64_t count,
                        const float *directions, float *filters) {
    struct stretch laid_out[UNITS];
    for (int64_t i = 0; i < count; i++) {
        laid_out[i] = moved(s, i);
        lay_out(laid_out + i, units[i].g, units[i].x);
    }
    for (int64_t f = 0; f < s->k->filters; f += TALL)
        for (int64_t i = 0; i < count; i++) {
            few_filters(laid_out + i, f, filters, NULL);
            finish(s->k, units + i, directions, f, filters);
        }
}

static int32_t some_units(const struct convolution *k, const struct unit *units, int64_t count,
                          const float *directions) {
    struct stretch s = first_stretch(k);
    int64_t values = filter_values(k, is_whole(&s) ? TALL : k->filters);
    float *filters = malloc((size_t)values * sizeof(float));
    s.g = malloc((size_t)(count * pair_values(&s)) * sizeof(uint16_t));
    if (filters == NULL || s.g == NULL) return free(filters), free(s.g), NO_MEMORY;
    s.x = s.g + g_values(&s);
    if (is_whole(&s))
        short_units(&s, units, count, directions, filters);
    else
        long_unit(s, units, directions, filters);
    for (int64_t i = 0; i < count; i++)
        low_shifts(units[i].g, k->views * k->height * k->width, k->filters, units[i].shifts);
    free(filters), free(s.g);
    return OK;
}

/* The sum over some units, laid out in pairs, of factor * gradient, for a few filters from f on: added to `total`.
 * `few` holds those filters. */
static TARGET void add_few(const struct stretch *units, const float *factors, int64_t count, int64_t f,
                           float *restrict few, double *restrict total) {
    const struct convolution *k = units->k;
    int64_t filters = least(TALL, k->filters - f), channels = whole(k->channels);
    for (int64_t first = 0; first < count; first += FEW) {
        memset(few, 0, sizeof(float) * (size_t)filter_values(k, filters));
        for (int64_t unit = first; unit < least(first + FEW, count); unit++)
            if (factors[unit] != 0) /* else what it has may not be finite */
                few_filters(units + unit, f, few, factors + unit);
        for (int64_t tap = 0; tap < filters * k->kernel_height * k->kernel_width; tap++)
            for (int64_t c = 0; c < k->channels; c++) total[tap * k->channels + c] += few[tap * channels + c];
    }
}
#endif

static enum status check_pairs(int32_t path, const struct convolution *k) {
    if (loops_of(path) == NULL || !runs_pairs(path)) return UNSUPPORTED;
    return k == NULL ? NO_POINTER : check_shape(k);
}

int32_t low_filters(int32_t path, const struct convolution *k, struct halves g, struct halves x,
                    struct floats directions, struct halves result, struct doubles moments,
                    struct floats shifts) {
    REQUIRE(check_pairs(path, k));
    int64_t outputs = PRODUCT(k->views, k->height, k->width, k->filters);
    int64_t inputs = PRODUCT(k->views, k->in_height, k->in_width, k->channels);
    int64_t weights = PRODUCT(k->filters, k->kernel_height, k->kernel_width, k->channels);
    REQUIRE(FITS(g, PRODUCT(k->units, outputs)));
    REQUIRE(FITS(x, PRODUCT(k->units, inputs)));
    REQUIRE(FITS(directions, weights));
    REQUIRE(result.count == 0 ? OK : FITS(result, PRODUCT(k->units, weights)));
    REQUIRE(FITS(moments, PRODUCT(3, k->units, k->filters)));
    REQUIRE(FITS(shifts, PRODUCT(k->units, k->filters)));
#if BUILDS_PAIRS
    struct stretch s = first_stretch(k);
    if (pair_values(&s) < 0 || filter_values(k, k->filters + TALL) < 0) return WRONG_SIZE;
    int64_t at_once = is_whole(&s) ? least(UNITS, CACHED / pair_values(&s) + 1) : 1;
    int32_t status = OK;
    IN_THREADS
    for (int64_t part = 0; part < (k->units + at_once - 1) / at_once; part++) {
        int64_t first = part * at_once, count = least(at_once, k->units - first);
        struct unit units[UNITS];
        for (int64_t i = 0; i < count; i++)
            units[i] = (struct unit){
                .g = g.values + (first + i) * outputs, .x = x.values + (first + i) * inputs,
                .result = result.count == 0 ? NULL : result.values + (first + i) * weights,
                .moments = moments.values + (first + i) * k->filters, .count = k->units * k->filters,
                .shifts = shifts.values + (first + i) * k->filters,
            };
        if (some_units(k, units, count, directions.values) != OK) status = NO_MEMORY;
    }
    return status;
#else
    return UNSUPPORTED;
#endif
}

int32_t low_filter_sum(int32_t path, const struct convolution *k, struct halves g, struct halves x,
                       struct floats factors, struct doubles total) {
    REQUIRE(check_pairs(path, k));
    int64_t outputs = PRODUCT(k->views, k->height, k->width, k->filters);
    int64_t inputs = PRODUCT(k->views, k->in_height, k->in_width, k->channels);
    int64_t filter = PRODUCT(k->kernel_height, k->kernel_width, k->channels);
    REQUIRE(FITS(g, PRODUCT(k->units, outputs)));
    REQUIRE(FITS(x, PRODUCT(k->units, inputs)));
    REQUIRE(FITS(factors, k->units));
    REQUIRE(FITS(total, PRODUCT(k->filters, filter)));
#if BUILDS_PAIRS
    struct stretch s = first_stretch(k), units[UNITS];
    if (!is_whole(&s)) return UNSUPPORTED; /* it would round in another order */
    int64_t values = PRODUCT(pair_values(&s), UNITS), room = filter_values(k, TALL);
    if (values < 0 || room < 0) return WRONG_SIZE;
    uint16_t *pairs = malloc((size_t)values * sizeof(uint16_t));
    if (pairs == NULL) return NO_MEMORY;
    s.g = pairs, s.x = pairs + g_values(&s), s.rounds = 1;
    int32_t status = OK;
    for (int64_t first = 0; first < k->units && status == OK; first += UNITS) {
        int64_t count = least(UNITS, k->units - first), blocks = (k->filters + TALL - 1) / TALL;
        IN_THREADS
        for (int64_t i = 0; i < count; i++) {
            units[i] = moved(&s, i);
            lay_out(units + i, g.values + (first + i) * outputs, x.values + (first + i) * inputs);
        }
        IN_THREADS
        for (int64_t block = 0; block < blocks; block++) {
            float *here = malloc((size_t)room * sizeof(float));
            if (here != NULL)
                add_few(units, factors.values + first, count, block * TALL, here,
                        total.values + block * TALL * filter);
            else
                status = NO_MEMORY; /* whichever threads write, they write the same */
            free(here);
        }
    }
    free(pairs);
    return status;
#else
    return UNSUPPORTED;
#endif
}
