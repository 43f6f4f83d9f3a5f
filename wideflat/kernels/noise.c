/* Weights times noise, or noise alone. */
#include "noise.h"

/* out <- z * w, or z itself without w, with the numbers from `place` on */
void multiply(
    int64_t threads, int64_t count, int64_t place, const NoiseStream *noise, REAL *out, const REAL *w
) {
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int64_t part = 0; part < threads; part++) {
        float z[CHUNK];
        Reader reader = reader_of(noise);
        for (int64_t chunk = part * chunks / threads; chunk < (part + 1) * chunks / threads; chunk++) {
            const int64_t at = chunk * CHUNK, n = count - at < CHUNK ? count - at : CHUNK;
            Ahead ahead = ahead_of(n, BEFOREHAND);
            look_ahead_at(&ahead, out + at);
            look_ahead_at(&ahead, w ? w + at : 0);
            for (int64_t here = at, some; here < at + n; here += some) {
                some = numbers_at(place + here, at + n - here);
                draw(&reader, noise, place + here, some, z, &ahead);
                if (w)
                    for (int64_t i = 0; i < some; i++) out[here + i] = z[i] * w[here + i];
                else
                    for (int64_t i = 0; i < some; i++) out[here + i] = z[i];
            }
        }
    }
}
