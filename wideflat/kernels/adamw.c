/* A step of Adam or AdamW on w' with what Entropic does around it, in one pass over memory. */
#include "noise.h"

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, pull, alpha, noise;
    int64_t decoupled, maximize;
} AdamParameters;

#include <math.h>

#ifdef DOUBLE
#define SQRT sqrt
#else
#define SQRT sqrtf
#endif

#define ALWAYS static inline __attribute__((always_inline))

/* w' <- w' - pull (w' - w); Adam's step with the gradient g and the moments m and v; w' <- w' + noise z;
 * mu <- alpha mu + (1 - alpha) w'. `rate` is lr over the correction of m, `root` the square root of that of v. */
ALWAYS void adam_chunk(
    int noisy, int mean, int64_t n, const AdamParameters *rule, REAL rate, REAL root, REAL *restrict x,
    const REAL *restrict w, REAL *restrict mu, REAL *restrict m, REAL *restrict v, const REAL *restrict g,
    const float *restrict z
) {
    const REAL beta1 = rule->beta1, beta2 = rule->beta2, eps = rule->eps, pull = rule->pull, noise = rule->noise;
    const REAL alpha = rule->alpha, fresh = 1 - rule->alpha, sign = rule->maximize ? -1 : 1;
    const REAL inside = rule->decoupled ? 0 : rule->weight_decay;
    const REAL outside = rule->decoupled ? 1 - rule->lr * rule->weight_decay : 1;
    const REAL new1 = 1 - rule->beta1, new2 = 1 - rule->beta2, inverse = 1 / root;
    const int late = rule->alpha <= 0.5; /* which of two forms of the mean rounds less, as torch.lerp does */
    for (int64_t i = 0; i < n; i++) {
        REAL now = x[i] - pull * (x[i] - w[i]);
        const REAL d = sign * g[i] + inside * now;
        const REAL first = beta1 * m[i] + new1 * d, second = beta2 * v[i] + new2 * d * d;
        m[i] = first;
        v[i] = second;
        now = outside * now - rate * first / (SQRT(second) * inverse + eps);
        if (noisy) now += noise * z[i];
        x[i] = now;
        if (mean) mu[i] = late ? now - alpha * (now - mu[i]) : mu[i] + fresh * (now - mu[i]);
    }
}

#define AT(list, place) (list[t] + (place))
#define ADAM(noisy, mean, from, count) \
    adam_chunk( \
        noisy, mean, count, rule, rates[t], roots[t], AT(x, from), AT(w, from), mean ? AT(mu, from) : 0, AT(m, from), \
        AT(v, from), AT(g, from), z \
    )

static void work(
    int64_t from, int64_t to, const int64_t *sizes, const int64_t *places, const double *rates, const double *roots,
    const AdamParameters *rule, const NoiseStream *noise, REAL *const *x, REAL *const *w,
    REAL *const *mu, REAL *const *m, REAL *const *v, const REAL *const *g
) {
    float z[CHUNK];
    Reader reader = {0};
    if (noise) reader = reader_of(noise);
    for (Walk walk = walk_of(from, to, sizes); next_chunk(&walk, sizes);) {
        const int64_t t = walk.tensor, at = walk.at, n = walk.n;
        if (!noise) {
            if (mu) ADAM(0, 1, at, n);
            else ADAM(0, 0, at, n);
            continue;
        }
        Ahead ahead = ahead_of(n, BEFOREHAND);
        const REAL *arrays[] = {AT(x, at), AT(w, at), AT(m, at), AT(v, at), AT(g, at), mu ? AT(mu, at) : 0};
        for (int k = 0; k < 6; k++) look_ahead_at(&ahead, arrays[k]);
        for (int64_t here = at, some; here < at + n; here += some) {
            some = numbers_at(places[t] + here, at + n - here);
            draw(&reader, noise, places[t] + here, some, z, &ahead);
            if (mu) ADAM(1, 1, here, some);
            else ADAM(1, 0, here, some);
        }
    }
}

void adam_step(
    int64_t threads, int64_t tensors, const int64_t *sizes, const int64_t *places, const double *rates,
    const double *roots, const AdamParameters *rule, const NoiseStream *noise, REAL *const *x, REAL *const *w,
    REAL *const *mu, REAL *const *m, REAL *const *v, const REAL *const *g
) {
    const int64_t chunks = all_chunks(tensors, sizes);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int64_t part = 0; part < threads; part++)
        work(
            part * chunks / threads, (part + 1) * chunks / threads, sizes, places, rates, roots, rule, noise, x, w, mu,
            m, v, g
        );
}
