"""The CUDA text of `chairlift.cache.span_kernel`.

Fragments as in the PTX ISA, mma.m16n8k16: a lane holds queries lane / 4 and lane / 4 + 8 of its warp's 16.
Keys and values of a tile lie in shared memory; the next tile's keys are on their way while this one's values
are used.
"""

from __future__ import annotations

HEADER = """
__device__ __forceinline__ unsigned chairlift_shared(const void* p) {
    return (unsigned)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void chairlift_load4(unsigned* r, unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void chairlift_load4t(unsigned* r, unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
template <bool BF>
__device__ __forceinline__ void chairlift_mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    if (BF) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
template <bool BF>
__device__ __forceinline__ unsigned chairlift_pack(float low, float high) {
    unsigned r;
    if (BF) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ void chairlift_copy16(unsigned to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0));
}
#define CHAIRLIFT_COMMIT asm volatile("cp.async.commit_group;")
#define CHAIRLIFT_WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n))
"""

SOURCE = """
    constexpr int STRIDE = D + 8;            // numbers; rows of a tile begin in different banks
    constexpr int STEPS = D / 16, TILES = BN / 8, OUT = D / 8;
    constexpr float LOG2E = 1.4426950408889634f;
    __shared__ __align__(16) unsigned short ks[BN * STRIDE];
    __shared__ __align__(16) unsigned short vs[BN * STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y;
    const int* tile_facts = table + 2 + SPANS * 7 + blockIdx.x * 2;
    const int span = tile_facts[0], first_row = tile_facts[1];
    unsigned short* target = (unsigned short*)out;
    if (span < 0) {                          // the last first_row tokens belong to nobody
        const size_t begin = (size_t)(table[0] - first_row) * HQ * D;
        for (int i = threadIdx.x; i < first_row * G * D; i += 128) {
            target[begin + ((size_t)(i / (G * D)) * HQ + kv_head * G) * D + i % (G * D)] = 0;
        }
        return;
    }
    const int* facts = table + 2 + span * 7;
    const int start = facts[0], tokens = facts[1], held = facts[2], capacity = facts[3];
    const int offset = facts[4], first = facts[5], window = facts[6];
    const unsigned short* keys;
    const unsigned short* values;
    switch (span) {
        POINTERS
    }
    keys += (size_t)kv_head * capacity * D;
    values += (size_t)kv_head * capacity * D;

    const int rows = tokens * G;
    const int own = first_row + warp * 16 + lane / 4;      // and own + 8
    const int r0 = min(own, rows - 1), r1 = min(own + 8, rows - 1);
    const unsigned short* q0 = (const unsigned short*)queries
        + ((size_t)(start + r0 / G) * HQ + kv_head * G + r0 % G) * D;
    const unsigned short* q1 = (const unsigned short*)queries
        + ((size_t)(start + r1 / G) * HQ + kv_head * G + r1 % G) * D;
    unsigned q[STEPS][4];
    #pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int d = k * 16 + lane % 4 * 2;
        q[k][0] = *(const unsigned*)(q0 + d);
        q[k][1] = *(const unsigned*)(q1 + d);
        q[k][2] = *(const unsigned*)(q0 + d + 8);
        q[k][3] = *(const unsigned*)(q1 + d + 8);
    }
    const int p0 = offset + r0 / G - first, p1 = offset + r1 / G - first;   // as indices of keys
    const int block_first = offset + first_row / G - first;
    const int block_last = offset + min(first_row + 63, rows - 1) / G - first;
    const int end = min(held, block_last + 1);
    const int begin = window > 0 ? max(0, block_first - window + 1) / BN * BN : 0;

    float acc[OUT][4];
    #pragma unroll
    for (int i = 0; i < OUT; ++i) { acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f; }
    float m0 = -1e30f, m1 = -1e30f, l0 = 0.0f, l1 = 0.0f;
    const float factor = scale[0] * LOG2E;
    const unsigned k_at = chairlift_shared(ks), v_at = chairlift_shared(vs);

    #define LOAD(to, from, tile) \\
        for (int i = threadIdx.x; i < BN * (D / 8); i += 128) { \\
            const int n = i / (D / 8), c = i % (D / 8) * 8; \\
            const bool there = (tile) + n < end; \\
            chairlift_copy16((to) + (n * STRIDE + c) * 2, \\
                (from) + (size_t)(there ? (tile) + n : 0) * D + c, there); \\
        } \\
        CHAIRLIFT_COMMIT;

    LOAD(k_at, keys, begin)
    for (int tile = begin; tile < end; tile += BN) {
        LOAD(v_at, values, tile)
        CHAIRLIFT_WAIT(1);
        __syncthreads();
        float s[TILES][4];
        #pragma unroll
        for (int j = 0; j < TILES; ++j) {
            s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
            #pragma unroll
            for (int k = 0; k < STEPS; k += 2) {
                unsigned b[4];
                chairlift_load4(b, k_at + ((j * 8 + lane % 8) * STRIDE + k * 16 + lane / 8 * 8) * 2);
                chairlift_mma<BF>(s[j], q[k], b[0], b[1]);
                chairlift_mma<BF>(s[j], q[k + 1], b[2], b[3]);
            }
        }
        __syncthreads();
        if (tile + BN < end) { LOAD(k_at, keys, tile + BN) }
        else { CHAIRLIFT_COMMIT; }
        float t0 = m0, t1 = m1;
        #pragma unroll
        for (int j = 0; j < TILES; ++j) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = tile + j * 8 + lane % 4 * 2 + i % 2;
                const int at = i < 2 ? p0 : p1;
                const bool seen = key <= at && key < held && (window <= 0 || key > at - window);
                s[j][i] = seen ? s[j][i] * factor : -2e30f;
            }
            t0 = fmaxf(t0, fmaxf(s[j][0], s[j][1]));
            t1 = fmaxf(t1, fmaxf(s[j][2], s[j][3]));
        }
        #pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            t0 = fmaxf(t0, __shfl_xor_sync(0xffffffffu, t0, step));
            t1 = fmaxf(t1, __shfl_xor_sync(0xffffffffu, t1, step));
        }
        const float f0 = exp2f(m0 - t0), f1 = exp2f(m1 - t1);
        m0 = t0; m1 = t1; l0 *= f0; l1 *= f1;
        #pragma unroll
        for (int i = 0; i < OUT; ++i) { acc[i][0] *= f0; acc[i][1] *= f0; acc[i][2] *= f1; acc[i][3] *= f1; }
        unsigned p[TILES][2];
        #pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float a = s[j][0] > -1e30f ? exp2f(s[j][0] - m0) : 0.0f;
            const float b = s[j][1] > -1e30f ? exp2f(s[j][1] - m0) : 0.0f;
            const float c = s[j][2] > -1e30f ? exp2f(s[j][2] - m1) : 0.0f;
            const float d = s[j][3] > -1e30f ? exp2f(s[j][3] - m1) : 0.0f;
            l0 += a + b; l1 += c + d;
            p[j][0] = chairlift_pack<BF>(a, b);
            p[j][1] = chairlift_pack<BF>(c, d);
        }
        CHAIRLIFT_WAIT(1);
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < BN / 16; ++k) {
            const unsigned a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
            #pragma unroll
            for (int i = 0; i < OUT; i += 2) {
                unsigned b[4];
                chairlift_load4t(b, v_at
                    + ((k * 16 + lane % 8 + lane / 8 % 2 * 8) * STRIDE + i * 8 + lane / 16 * 8) * 2);
                chairlift_mma<BF>(acc[i], a, b[0], b[1]);
                chairlift_mma<BF>(acc[i + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    #undef LOAD
    CHAIRLIFT_WAIT(0);
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        l0 += __shfl_xor_sync(0xffffffffu, l0, step);
        l1 += __shfl_xor_sync(0xffffffffu, l1, step);
    }
    if (SINKS) {
        const float k0 = (float)sinks[kv_head * G + r0 % G] * LOG2E;
        const float k1 = (float)sinks[kv_head * G + r1 % G] * LOG2E;
        const float t0 = fmaxf(m0, k0), t1 = fmaxf(m1, k1);
        const float f0 = exp2f(m0 - t0), f1 = exp2f(m1 - t1);
        l0 = l0 * f0 + exp2f(k0 - t0);
        l1 = l1 * f1 + exp2f(k1 - t1);
        #pragma unroll
        for (int i = 0; i < OUT; ++i) { acc[i][0] *= f0; acc[i][1] *= f0; acc[i][2] *= f1; acc[i][3] *= f1; }
    }
    const float n0 = l0 > 0.0f ? 1.0f / l0 : 0.0f, n1 = l1 > 0.0f ? 1.0f / l1 : 0.0f;
    const size_t o0 = ((size_t)(start - table[1] + r0 / G) * HQ + kv_head * G + r0 % G) * D;
    const size_t o1 = ((size_t)(start - table[1] + r1 / G) * HQ + kv_head * G + r1 % G) * D;
    #pragma unroll
    for (int i = 0; i < OUT; ++i) {
        const int d = i * 8 + lane % 4 * 2;
        const unsigned low = chairlift_pack<BF>(acc[i][0] * n0, acc[i][1] * n0);
        const unsigned high = chairlift_pack<BF>(acc[i][2] * n1, acc[i][3] * n1);
        if (own < rows) *(unsigned*)(target + o0 + d) = low;
        if (own + 8 < rows) *(unsigned*)(target + o1 + d) = high;
    }
"""
