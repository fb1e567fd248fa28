/* The delta rule as a loop over tokens; token_loop.py compiles it. Tensors are [B, T, H, channels]:
   a head's rows of one sequence lie H * channels apart. */

#define AT(x, size) ((x) + ((b * T + t) * H + h) * (size))
#define HEADS for (long b = 0; b < B; b++) for (long h = 0; h < H; h++)

static float dot(const float *x, const float *y, long n) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void add(float *x, float factor, const float *y, long n) {
    for (long i = 0; i < n; i++) x[i] += factor * y[i];
}

static void clear(float *x, long n) {
    for (long i = 0; i < n; i++) x[i] = 0;
}

void forward(long B, long T, long H, long K, long V, float scale, float *S, const float *q,
             const float *k, const float *v, const float *beta, float *o, float *e) {
    HEADS {
        clear(S, V * K);
        for (long t = 0; t < T; t++)
            for (long i = 0; i < V; i++) {
                float *s = S + i * K;
                float error = AT(v, V)[i] - dot(s, AT(k, K), K);
                AT(e, V)[i] = error;
                add(s, *AT(beta, 1) * error, AT(k, K), K);
                AT(o, V)[i] = scale * dot(s, AT(q, K), K);
            }
    }
}

void backward(long B, long T, long H, long K, long V, float scale, float *S, const float *q,
              const float *k, const float *beta, const float *e, const float *d_o,
              float *dq, float *dk, float *dv, float *dbeta) {
    HEADS {
        clear(S, V * K);  /* the gradient of the state, from the last token to the first */
        for (long t = T - 1; t >= 0; t--) {
            clear(AT(dk, K), K);
            *AT(dbeta, 1) = 0;
            for (long i = 0; i < V; i++) {
                float *s = S + i * K;
                add(s, scale * AT(d_o, V)[i], AT(q, K), K);
                float du = dot(s, AT(k, K), K);
                *AT(dbeta, 1) += du * AT(e, V)[i];
                add(AT(dk, K), *AT(beta, 1) * AT(e, V)[i], s, K);
                AT(dv, V)[i] = *AT(beta, 1) * du;
                add(s, -AT(dv, V)[i], AT(k, K), K);
            }
        }
        clear(S, V * K);  /* the state, from the first token to the last */
        for (long t = 0; t < T; t++) {
            clear(AT(dq, K), K);
            for (long i = 0; i < V; i++) {
                float *s = S + i * K;
                add(AT(dk, K), -AT(dv, V)[i], s, K);
                add(s, *AT(beta, 1) * AT(e, V)[i], AT(k, K), K);
                add(AT(dq, K), scale * AT(d_o, V)[i], s, K);
            }
        }
    }
}
