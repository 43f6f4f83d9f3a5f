/* Sums over rows of the Gram matrix, and whole epochs of many committee machines.
 *
 * The algebra is that of wideflat/committee/gram.py, whose names these are. REAL is float or double, with DOUBLE defined for
 * the second (wideflat/kernels/library.py).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------- sums over rows of a table */

typedef REAL Vector __attribute__((vector_size(32)));

/* Sums of 3 units over 3 vectors of columns need 9 registers, and with a row and a coefficient all of it stays in the 16
 * that there are. A row that is read is used three times, so the arithmetic is the limit, not the cache. */
#define LANES (int64_t)(32 / sizeof(REAL))
#define VECTORS 3
#define TILE (VECTORS * LANES)
#define UNITS 3

/* Without the same alignment as Vector, for numbers anywhere in memory. */
typedef Vector Loose __attribute__((aligned(sizeof(REAL)), may_alias));

ALWAYS void add_tile(
    int units, int64_t count, const int32_t *list, const int64_t *patterns, const REAL *c, int64_t c_unit,
    const REAL *table, REAL *a, int64_t a_unit, int64_t columns, REAL *q, const REAL *share
) {
    Vector sum[UNITS][VECTORS];
    for (int u = 0; u < units; u++)
        for (int k = 0; k < VECTORS; k++) sum[u][k] = (Vector){0};
    for (int64_t j = 0; j < count; j++) {
        const int32_t at = list[j];
        const Vector *row = (const Vector *)(table + patterns[at] * TILE);
        for (int u = 0; u < units; u++)
            for (int k = 0; k < VECTORS; k++) sum[u][k] += c[u * c_unit + at] * row[k];
    }
    for (int u = 0; u < units; u++) {
        if (columns >= TILE) {
            Loose *out = (Loose *)(a + u * a_unit), *mean = (Loose *)(q + u * a_unit);
            for (int k = 0; k < VECTORS; k++) {
                out[k] += sum[u][k];
                if (share) mean[k] += share[u] * out[k];
            }
        } else {
            for (int64_t i = 0; i < columns; i++) {
                a[u * a_unit + i] += sum[u][i / LANES][i % LANES];
                if (share) q[u * a_unit + i] += share[u] * a[u * a_unit + i];
            }
        }
    }
}

/* The places of a mini-batch with a coefficient in any unit. */
static int64_t nonzero(int64_t hidden, int64_t batch, const REAL *c, int64_t c_unit, int32_t *list) {
    int64_t count = 0;
    for (int64_t at = 0; at < batch; at++) {
        int some = 0;
        for (int64_t h = 0; h < hidden; h++) some |= c[h * c_unit + at] != 0;
        list[count] = at;
        count += some;
    }
    return count;
}

/* All units of one network on one tile: a <- a + sum, and q <- q + share a where there is a share. */
ALWAYS void add_units(
    int64_t hidden, int64_t count, const int32_t *list, const int64_t *patterns, const REAL *c, int64_t c_unit,
    const REAL *table, REAL *a, int64_t a_unit, int64_t columns, REAL *q, const REAL *share
) {
    int64_t h = 0;
    for (; h + UNITS <= hidden; h += UNITS)
        add_tile(
            UNITS, count, list, patterns, c + h * c_unit, c_unit, table, a + h * a_unit, a_unit, columns,
            q + h * a_unit, share ? share + h : 0
        );
    if (hidden - h == 2)
        add_tile(
            2, count, list, patterns, c + h * c_unit, c_unit, table, a + h * a_unit, a_unit, columns, q + h * a_unit,
            share ? share + h : 0
        );
    else if (hidden - h == 1)
        add_tile(
            1, count, list, patterns, c + h * c_unit, c_unit, table, a + h * a_unit, a_unit, columns, q + h * a_unit,
            share ? share + h : 0
        );
}

/* a[n][h] <- a[n][h] + sum over b of c[n][h][b] table[patterns[n][b]], for each network n and hidden unit h, in the order
 * of b. Returns the number of rows that were added: those without any coefficient are left out.
 *
 * The table comes in tiles of TILE columns of all `rows`; only its first `used` columns are not zero, and a has room for
 * `columns`. a and c may have gaps between networks and units. `list` and `counts` are working memory for networks x
 * batch and networks numbers. */
int64_t add_rows(
    int64_t networks, int64_t hidden, int64_t batch, int64_t rows, int64_t columns, int64_t used,
    const int64_t *patterns, const REAL *tiles, const REAL *c, int64_t c_network, int64_t c_unit, REAL *a,
    int64_t a_network, int64_t a_unit, int32_t *list, int64_t *counts
) {
    int64_t total = 0;
    for (int64_t n = 0; n < networks; n++)
        total += counts[n] = nonzero(hidden, batch, c + n * c_network, c_unit, list + n * batch);
    for (int64_t start = 0; start < used; start += TILE)
        for (int64_t n = 0; n < networks; n++)
            if (counts[n])
                add_units(
                    hidden, counts[n], list + n * batch, patterns + n * batch, c + n * c_network, c_unit,
                    tiles + start * rows, a + n * a_network + start, a_unit, columns - start, a, 0
                );
    return total;
}

/* ---------------------------------------------------------------------------------- epochs of committee machines */

#define T(k, rest) (1 + (rest) * (r * ((REAL)1 / (k)))) /* 1 + r/k (...): the series of exp(r) from inside out */
#ifdef DOUBLE
typedef uint64_t Bits;
#define MANTISSA 52
#define MAGIC 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to a whole number, which is then in the lowest bits */
#define ONE 0x3ff0000000000000ULL
#define LARGEST 708.0
#define SERIES T(1, T(2, T(3, T(4, T(5, T(6, T(7, T(8, T(9, T(10, T(11, T(12, T(13, 1)))))))))))))
#define LN2_HIGH 6.93147180369123816490e-01
#define LN2_LOW 1.90821492927058770002e-10
#define ROOT sqrt
#else
typedef uint32_t Bits;
#define MANTISSA 23
#define MAGIC 12582912.0f
#define ONE 0x3f800000u
#define LARGEST 87.0f
#define SERIES T(1, T(2, T(3, T(4, T(5, T(6, T(7, 1)))))))
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define ROOT sqrtf
#endif

/* exp(x) = 2^n exp(r), with r small enough for the first terms of the series. */
ALWAYS REAL exponential(REAL x) {
    x = x > LARGEST ? LARGEST : x;
    x = x < -LARGEST ? -LARGEST : x;
    const REAL shifted = x * (REAL)1.44269504088896340736 + MAGIC;
    const REAL n = shifted - MAGIC, r = x - n * LN2_HIGH - n * LN2_LOW;
    REAL sum = SERIES, power;
    Bits bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << MANTISSA) + ONE;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

ALWAYS REAL sigmoid(REAL x) { return 1 / (1 + exponential(-x)); }

/* Of numbers that are a multiple of two vectors. */
ALWAYS REAL dot(int64_t n, const REAL *x, const REAL *y) {
    Vector even = {0}, odd = {0};
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        even += *(const Loose *)(x + i) * *(const Loose *)(y + i);
        odd += *(const Loose *)(x + i + LANES) * *(const Loose *)(y + i + LANES);
    }
    REAL sum = 0;
    for (int l = 0; l < LANES; l++) sum += even[l] + odd[l];
    return sum;
}

/* -rate times the derivative of the summed loss by the pre-activations, from u = 2 beta z (hidden, batch); see
 * coefficients in wideflat/committee/forms.py. Those below the threshold are zero. Overwrites u. */
static void coefficients(
    int64_t hidden, int64_t batch, REAL *restrict u, REAL *restrict slope, const REAL *restrict inside,
    const REAL *restrict outside, REAL threshold
) {
    for (int64_t b = 0; b < batch; b++) slope[b] = -(REAL)hidden / 2;
    for (int64_t h = 0; h < hidden; h++)
        for (int64_t b = 0; b < batch; b++) {
            u[h * batch + b] = sigmoid(u[h * batch + b]);
            slope[b] += u[h * batch + b];
        }
    for (int64_t b = 0; b < batch; b++) slope[b] = sigmoid(slope[b] * inside[b]) * outside[b];
    for (int64_t h = 0; h < hidden; h++)
        for (int64_t b = 0; b < batch; b++) {
            const REAL s = u[h * batch + b], c = (s - s * s) * slope[b];
            u[h * batch + b] = c > threshold || c < -threshold ? c : 0;
        }
}

/* A mini-batch of one network: the patterns from `first` on, and what multiplies their targets. The rest of the room is
 * the pattern of zeros, whose number is `patterns`. */
static void present(
    int64_t patterns, int64_t size, int64_t batch, const int64_t *order, int64_t first, const REAL *target,
    REAL in_factor, REAL out_factor, int64_t *places, REAL *inside, REAL *outside
) {
    for (int64_t b = 0; b < batch; b++) {
        places[b] = b < size && first + b < patterns ? order[first + b] : patterns;
        inside[b] = target[places[b]] * in_factor;
        outside[b] = target[places[b]] * out_factor;
    }
}

typedef struct {
    int64_t networks, hidden, patterns, width, rows, size, batch, inner_steps;
    double slope, inside, outside, threshold, pull, alpha, lr;
} EsgdEpoch;

/* The explorer is w' = e w + f S. Working memory of one network and unit: what changes in every inner step. */
typedef struct {
    REAL e, f, overlap, in_mean, norm2, along, own;
} Explorer;

/* One epoch of eSGD in the Gram form, as GramESGD in wideflat/committee/gram.py.
 *
 * Networks x hidden units x width: a, c, and working memory s, q, q_c. Networks x hidden: m, explorers. Working memory:
 * steps (networks, inner_steps, hidden, batch), shares (networks, inner_steps, hidden), buffer (4 batch), picked
 * (networks, inner_steps, batch), counts (networks), list (networks, batch). Of a mini-batch of `size` patterns there is room
 * for `batch`, a multiple of 16; the rest is the pattern of zeros, whose number is `patterns`. */
void esgd_epoch(
    const EsgdEpoch *epoch, const int64_t *orders, const REAL *target, const REAL *tiles, REAL *a, REAL *c, REAL *m,
    REAL *d, REAL *s, REAL *q, REAL *q_c, Explorer *explorers, REAL *steps, REAL *shares, REAL *buffer,
    int64_t *picked, int64_t *counts, int32_t *list
) {
    const int64_t N = epoch->networks, H = epoch->hidden, W = epoch->width, B = epoch->batch, L = epoch->inner_steps;
    const int64_t P = epoch->patterns, size = epoch->size, batches = (P + size - 1) / size;
    const REAL slope = epoch->slope, k = epoch->pull, eta = epoch->lr;
    REAL *in_w = buffer, *in_s = buffer + B, *inside = buffer + 2 * B, *outside = buffer + 3 * B;
    const REAL last = pow(epoch->alpha, L);
    for (int64_t outer = 0, number = 0; outer < batches; outer++) {
        memset(s, 0, N * H * W * sizeof(REAL));
        memset(q, 0, N * H * W * sizeof(REAL));
        for (int64_t i = 0; i < N * H; i++) explorers[i] = (Explorer){1, 1, 1, last, 0, 0, 0};
        for (int64_t l = 0; l < L; l++, number++) {
            const int64_t pass = number / batches, first = number % batches * size;
            const REAL weight = (1 - epoch->alpha) * pow(epoch->alpha, L - 1 - l);
            for (int64_t n = 0; n < N; n++) {
                int64_t *places = picked + (n * L + l) * B;
                const int64_t *order = orders + (n * L + pass) * P;
                REAL *u = steps + (n * L + l) * H * B, *share = shares + (n * L + l) * H;
                Explorer *at = explorers + n * H;
                present(P, size, B, order, first, target, epoch->inside, epoch->outside, places, inside, outside);
                for (int64_t h = 0; h < H; h++) {
                    const REAL *w = a + (n * H + h) * W, *explored = s + (n * H + h) * W;
                    const REAL e = at[h].e * slope, f = at[h].f * slope;
                    for (int64_t b = 0; b < B; b++) u[h * B + b] = w[places[b]] * e + explored[places[b]] * f;
                }
                coefficients(H, B, u, in_w, inside, outside, epoch->threshold);
                counts[n] = nonzero(H, B, u, B, list + n * B);
                for (int64_t h = 0; h < H; h++) {
                    Explorer *one = at + h;
                    one->along = one->own = 0;
                    if (counts[n]) {
                        const REAL *w = a + (n * H + h) * W, *explored = s + (n * H + h) * W;
                        for (int64_t b = 0; b < B; b++) in_w[b] = w[places[b]], in_s[b] = explored[places[b]];
                        one->along = dot(B, in_w, u + h * B);
                        one->own = dot(B, in_s, u + h * B);
                    }
                    /* w' <- (1 - k) w' + k w + dc X, normalised below */
                    one->e = k + (1 - k) * one->e;
                    one->f = (1 - k) * one->f;
                    one->overlap = k + (1 - k) * one->overlap;
                    one->norm2 = 2 * k * one->overlap + (1 - 2 * k);
                    share[h] = one->f * weight;
                    for (int64_t b = 0; b < B; b++) u[h * B + b] /= one->f;
                }
            }
            for (int64_t start = 0; start < P; start += TILE)
                for (int64_t n = 0; n < N; n++)
                    add_units(
                        H, counts[n], list + n * B, picked + (n * L + l) * B, steps + (n * L + l) * H * B, B,
                        tiles + start * epoch->rows, s + n * H * W + start, W, W - start, q + n * H * W + start,
                        shares + (n * L + l) * H
                    );
            for (int64_t n = 0; n < N; n++)
                for (int64_t h = 0; h < H; h++) {
                    Explorer *one = explorers + n * H + h;
                    if (counts[n]) {
                        const int64_t *places = picked + (n * L + l) * B;
                        const REAL *explored = s + (n * H + h) * W;
                        for (int64_t b = 0; b < B; b++) in_s[b] = explored[places[b]];
                        one->own += one->f * dot(B, in_s, steps + ((n * L + l) * H + h) * B);
                        one->norm2 += 2 * one->e * one->along + one->f * one->own;
                        one->overlap += one->along;
                    }
                    one->in_mean += weight * one->e;
                    const REAL norm = ROOT(one->norm2);
                    one->e /= norm, one->f /= norm, one->overlap /= norm;
                }
        }
        memset(q_c, 0, N * H * W * sizeof(REAL));
        for (int64_t n = 0; n < N; n++) {
            REAL distance = 0;
            for (int64_t h = 0; h < H; h++) {
                REAL *w = a + (n * H + h) * W, *w_c = c + (n * H + h) * W;
                REAL *mean = q + (n * H + h) * W, *mean_c = q_c + (n * H + h) * W;
                REAL share = 0; /* a step is in S from then on, so it is in Q with all later shares */
                for (int64_t l = L - 1; l >= 0; l--) {
                    share += shares[(n * L + l) * H + h];
                    const int64_t *places = picked + (n * L + l) * B;
                    const REAL *step = steps + ((n * L + l) * H + h) * B;
                    for (int64_t b = 0; b < size; b++) mean_c[places[b]] += share * step[b];
                }
                const REAL w_q = dot(W, w, mean_c), q_q = dot(W, mean, mean_c);
                const REAL away = 1 - explorers[n * H + h].in_mean, keep = 1 - eta * away;
                distance += away * away - 2 * away * w_q + q_q;
                const REAL norm = ROOT(keep * keep + 2 * eta * keep * w_q + eta * eta * q_q);
                const REAL kept = keep / norm, added = eta / norm;
                for (int64_t i = 0; i < W; i++) {
                    w[i] = w[i] * kept + mean[i] * added;
                    w_c[i] = w_c[i] * kept + mean_c[i] * added;
                }
                m[n * H + h] *= kept;
            }
            d[n] = distance / 2;
        }
    }
}

typedef struct {
    int64_t networks, hidden, patterns, width, stride, rows, size, batch, replicas, period, number;
    double slope, inside, outside, threshold, strength;
} RsgdEpoch;

/* One epoch of rSGD in the Gram form, as GramRSGD in wideflat/committee/gram.py: v (networks, hidden, stride) has
 * the columns A | I | J | C | M. Working memory: steps (networks, hidden, batch), buffer (3 batch), picked
 * (networks, batch), counts (networks), list (networks, batch). `number` is that of the first mini-batch, from 1. */
void rsgd_epoch(
    const RsgdEpoch *epoch, const int64_t *orders, const REAL *target, const REAL *tiles, REAL *v, REAL *steps,
    REAL *buffer, int64_t *picked, int64_t *counts, int32_t *list
) {
    const int64_t N = epoch->networks, H = epoch->hidden, W = epoch->width, S = epoch->stride, B = epoch->batch;
    const int64_t P = epoch->patterns, size = epoch->size, Y = epoch->replicas, at_c = 2 * W + Y, at_m = 3 * W + Y;
    const REAL strength = epoch->strength, slope = epoch->slope, share = (REAL)1 / Y;
    REAL *slopes = buffer, *inside = buffer + B, *outside = buffer + 2 * B;
    for (int64_t first = 0, number = epoch->number; first < P; first += size, number++) {
        for (int64_t n = 0; n < N; n++) {
            int64_t *places = picked + n * B;
            REAL *u = steps + n * H * B;
            present(P, size, B, orders + n * P, first, target, epoch->inside, epoch->outside, places, inside, outside);
            for (int64_t h = 0; h < H; h++)
                for (int64_t b = 0; b < B; b++) u[h * B + b] = slope * v[(n * H + h) * S + places[b]];
            coefficients(H, B, u, slopes, inside, outside, epoch->threshold);
            counts[n] = nonzero(H, B, u, B, list + n * B);
        }
        const int coupled = number % epoch->period == 0;
        if (coupled)
            for (int64_t restart = 0; restart < N; restart += Y)
                for (int64_t h = 0; h < H; h++)
                    for (int64_t column = 0; column < S; column += LANES) {
                        Vector mean = {0};
                        for (int64_t y = 0; y < Y; y++) mean += *(Loose *)(v + ((restart + y) * H + h) * S + column);
                        mean *= share;
                        for (int64_t y = 0; y < Y; y++) {
                            Loose *one = (Loose *)(v + ((restart + y) * H + h) * S + column);
                            if (strength < (REAL)0.5) *one += strength * (mean - *one);
                            else *one = mean - (1 - strength) * (mean - *one);
                        }
                    }
        for (int64_t start = 0; start < P; start += TILE)
            for (int64_t n = 0; n < N; n++)
                if (counts[n])
                    add_units(
                        H, counts[n], list + n * B, picked + n * B, steps + n * H * B, B, tiles + start * epoch->rows,
                        v + n * H * S + start, S, W - start, v, 0
                    );
        for (int64_t n = 0; n < N; n++) {
            if (!counts[n] && !coupled) continue;
            for (int64_t h = 0; h < H; h++) {
                REAL *w = v + (n * H + h) * S;
                for (int64_t j = 0; j < counts[n]; j++) {
                    const int32_t b = list[n * B + j];
                    w[at_c + picked[n * B + b]] += steps[(n * H + h) * B + b];
                }
                /* |w|^2 = C . (A + I) + M . J */
                Vector sum = {0};
                for (int64_t i = 0; i < W; i += LANES)
                    sum += *(Loose *)(w + at_c + i) * (*(Loose *)(w + i) + *(Loose *)(w + W + i));
                REAL norm2 = 0;
                for (int l = 0; l < LANES; l++) norm2 += sum[l];
                for (int64_t y = 0; y < Y; y++) norm2 += w[at_m + y] * w[2 * W + y];
                const REAL scale = 1 / ROOT(norm2);
                for (int64_t i = 0; i < S; i++) w[i] *= scale;
            }
        }
    }
}
