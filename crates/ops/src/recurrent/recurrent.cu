// One step of a recurrent layer, forward and back. KIND is LSTM, GRU or RNN, GATES the rows of its weights for a unit. Legend in
// mod.rs. OPERAND is the element type of operands and states. A block has UNITS units of SAMPLES samples; the product with the recurrent
// weight goes along its depth in order.

#define LSTM 0
#define GRU 1
#define RNN 2

#define UNITS 16
#define SAMPLES 16
#define DEPTH 32
#define STRIDE (DEPTH + 4)

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

#ifdef FORWARD
// From the input's share of the gates [t, b, GATES·h] (biases not in it) and the states before, the gates, what the backward pass
// keeps beside them (cells, or the recurrent share of the candidate), and the states y[b, t, h]. A thread to a unit of a sample.
extern "C" __global__ void step(
    const float *from_input, const OPERAND *w_hh, const OPERAND *b_ih, const OPERAND *b_hh, OPERAND *y, OPERAND *gates, OPERAND *kept, i64 at_step, i64 steps, i64 batch,
    i64 hidden, int relu) {
    __shared__ __align__(16) float weights[GATES][UNITS][STRIDE], states[SAMPLES][STRIDE];
    const int unit_of_block = threadIdx.x % UNITS, sample_of_block = threadIdx.x / UNITS;
    const i64 unit = (i64)blockIdx.x * UNITS + unit_of_block, sample = (i64)blockIdx.y * SAMPLES + sample_of_block;
    float from_state[GATES] = {};
    if (at_step > 0) {
        for (i64 start = 0; start < hidden; start += DEPTH) {
            __syncthreads();
            for (int at = threadIdx.x; at < GATES * UNITS * DEPTH; at += blockDim.x) {
                const int depth = at % DEPTH, row = at / DEPTH % UNITS, gate = at / DEPTH / UNITS;
                const i64 own = (i64)blockIdx.x * UNITS + row;
                const bool inside = own < hidden && start + depth < hidden;
                weights[gate][row][depth] = inside ? to_float(w_hh[(gate * hidden + own) * hidden + start + depth]) : 0.0f;
            }
            for (int at = threadIdx.x; at < SAMPLES * DEPTH; at += blockDim.x) {
                const int depth = at % DEPTH, row = at / DEPTH;
                const i64 own = (i64)blockIdx.y * SAMPLES + row;
                const bool inside = own < batch && start + depth < hidden;
                states[row][depth] = inside ? to_float(y[(own * steps + at_step - 1) * hidden + start + depth]) : 0.0f;
            }
            __syncthreads();
            #pragma unroll
            for (int depth = 0; depth < DEPTH; depth += 4) {
                const float4 state = *reinterpret_cast<const float4 *>(&states[sample_of_block][depth]);
                #pragma unroll
                for (int gate = 0; gate < GATES; gate++) {
                    const float4 weight = *reinterpret_cast<const float4 *>(&weights[gate][unit_of_block][depth]);
                    float sum = from_state[gate];
                    sum = fmaf(state.x, weight.x, sum);
                    sum = fmaf(state.y, weight.y, sum);
                    sum = fmaf(state.z, weight.z, sum);
                    from_state[gate] = fmaf(state.w, weight.w, sum);
                }
            }
        }
    }
    if (unit >= hidden || sample >= batch) return;
    const i64 row = at_step * batch + sample, now = (sample * steps + at_step) * hidden + unit;
    float x[GATES];
    #pragma unroll
    for (int gate = 0; gate < GATES; gate++) {
        x[gate] = from_input[(row * GATES + gate) * hidden + unit] + to_float(b_ih[gate * hidden + unit]);
        from_state[gate] += to_float(b_hh[gate * hidden + unit]);
    }
#if KIND == LSTM
    const float i = sigmoid(x[0] + from_state[0]), f = sigmoid(x[1] + from_state[1]);
    const float g = tanhf(x[2] + from_state[2]), o = sigmoid(x[3] + from_state[3]);
    const float before = at_step > 0 ? to_float(kept[(row - batch) * hidden + unit]) : 0.0f;
    const float cell = f * before + i * g;
    const float values[GATES] = {i, f, g, o};
    kept[row * hidden + unit] = from_float<OPERAND>(cell);
    y[now] = from_float<OPERAND>(o * tanhf(cell));
#elif KIND == GRU
    const float reset = sigmoid(x[0] + from_state[0]), update = sigmoid(x[1] + from_state[1]);
    const float candidate = tanhf(x[2] + reset * from_state[2]);
    const float before = at_step > 0 ? to_float(y[now - hidden]) : 0.0f;
    const float values[GATES] = {reset, update, candidate};
    kept[row * hidden + unit] = from_float<OPERAND>(from_state[2]);
    y[now] = from_float<OPERAND>((1.0f - update) * candidate + update * before);
#else
    const float sum = x[0] + from_state[0];
    y[now] = from_float<OPERAND>(relu ? (sum > 0.0f || sum != sum ? sum : 0.0f) : tanhf(sum));
#endif
#if KIND != RNN
    #pragma unroll
    for (int gate = 0; gate < GATES; gate++) gates[(row * GATES + gate) * hidden + unit] = from_float<OPERAND>(values[gate]);
#endif
}
#endif

#ifdef BACKWARD
#define BACK_SAMPLES 4
#if HALVES
#define COPY(copy, at, value) copy[at] = from_float<OPERAND>(value)
#else
#define COPY(copy, at, value)
#endif

// One step back. `to_input` and `to_state` [b, t, GATES·h] are the gradients of the gates' sums (one and the same but for a GRU's
// candidate) in f32, with copies of them as OPERAND for products if that is a half (HALVES); `carried` [b, h] is the gradient of the cells after (LSTM), or what of the state's gradient goes past the weight (GRU).
// A thread to a unit of BACK_SAMPLES samples.
extern "C" __global__ void step_back(
    const OPERAND *w_hh, const OPERAND *y, const OPERAND *gates, const OPERAND *kept, const OPERAND *g, float *to_input, float *to_state, OPERAND *input_copy, OPERAND *state_copy,
    float *carried, i64 at_step, i64 steps, i64 batch, i64 hidden, int relu) {
    __shared__ __align__(16) float weights[DEPTH][UNITS * 4], later[SAMPLES][DEPTH];
    const int unit_of_block = threadIdx.x % (UNITS * 4), line = threadIdx.x / (UNITS * 4);
    const i64 unit = (i64)blockIdx.x * (UNITS * 4) + unit_of_block, all = GATES * hidden;
    const i64 first = (i64)blockIdx.y * SAMPLES + line * BACK_SAMPLES;
    float d_next[BACK_SAMPLES] = {};
    if (at_step + 1 < steps) {
        for (i64 start = 0; start < all; start += DEPTH) {
            __syncthreads();
            for (int at = threadIdx.x; at < DEPTH * UNITS * 4; at += blockDim.x) {
                const i64 depth = start + at / (UNITS * 4), own = (i64)blockIdx.x * (UNITS * 4) + at % (UNITS * 4);
                weights[at / (UNITS * 4)][at % (UNITS * 4)] =
                    depth < all && own < hidden ? to_float(w_hh[depth * hidden + own]) : 0.0f;
            }
            for (int at = threadIdx.x; at < SAMPLES * DEPTH; at += blockDim.x) {
                const i64 own = (i64)blockIdx.y * SAMPLES + at / DEPTH, depth = start + at % DEPTH;
                later[at / DEPTH][at % DEPTH] =
                    own < batch && depth < all ? to_state[(own * steps + at_step + 1) * all + depth] : 0.0f;
            }
            __syncthreads();
            #pragma unroll
            for (int depth = 0; depth < DEPTH; depth++) {
                const float weight = weights[depth][unit_of_block];
                #pragma unroll
                for (int at = 0; at < BACK_SAMPLES; at++)
                    d_next[at] = fmaf(later[line * BACK_SAMPLES + at][depth], weight, d_next[at]);
            }
        }
    }
    if (unit >= hidden) return;
    #pragma unroll
    for (int at = 0; at < BACK_SAMPLES; at++) {
        const i64 sample = first + at;
        if (sample >= batch) continue;
        const i64 row = at_step * batch + sample, now = (sample * steps + at_step) * hidden + unit;
        const i64 to = (sample * steps + at_step) * all + unit;
        float *const own = carried + sample * hidden + unit;
        const float after = at_step + 1 < steps && KIND != RNN ? *own : 0.0f;
#if KIND == LSTM
        const float d_state = to_float(g[now]) + d_next[at];
        float gate[GATES];
        #pragma unroll
        for (int which = 0; which < GATES; which++) gate[which] = to_float(gates[(row * GATES + which) * hidden + unit]);
        const float i = gate[0], f = gate[1], c = gate[2], o = gate[3];
        const float before = at_step > 0 ? to_float(kept[(row - batch) * hidden + unit]) : 0.0f;
        const float squashed = tanhf(to_float(kept[row * hidden + unit]));
        const float d_cell = after + d_state * o * (1.0f - squashed * squashed);
        const float made[GATES] = {
            d_cell * c * (i * (1.0f - i)), d_cell * before * (f * (1.0f - f)), d_cell * i * (1.0f - c * c),
            d_state * squashed * (o * (1.0f - o))};
        *own = d_cell * f;
        #pragma unroll
        for (int which = 0; which < GATES; which++) {
            to_state[to + which * hidden] = made[which];
            COPY(state_copy, to + which * hidden, made[which]);
        }
#elif KIND == GRU
        const float d_state = to_float(g[now]) + (d_next[at] + after);
        float gate[GATES];
        #pragma unroll
        for (int which = 0; which < GATES; which++) gate[which] = to_float(gates[(row * GATES + which) * hidden + unit]);
        const float reset = gate[0], update = gate[1], candidate = gate[2], share = to_float(kept[row * hidden + unit]);
        const float before = at_step > 0 ? to_float(y[now - hidden]) : 0.0f;
        const float d_candidate = d_state * (1.0f - update) * (1.0f - candidate * candidate);
        const float d_reset = d_candidate * share * (reset * (1.0f - reset));
        const float d_update = d_state * (before - candidate) * (update * (1.0f - update));
        *own = d_state * update;
        const float by_input[GATES] = {d_reset, d_update, d_candidate}, by_state[GATES] = {d_reset, d_update, d_candidate * reset};
        #pragma unroll
        for (int which = 0; which < GATES; which++) {
            to_input[to + which * hidden] = by_input[which];
            to_state[to + which * hidden] = by_state[which];
            COPY(input_copy, to + which * hidden, by_input[which]);
            COPY(state_copy, to + which * hidden, by_state[which]);
        }
#else
        const float d_state = to_float(g[now]) + d_next[at], state = to_float(y[now]);
        const float made = relu ? (state > 0.0f ? d_state : 0.0f) : d_state * (1.0f - state * state);
        to_state[to] = made;
        COPY(state_copy, to, made);
#endif
    }
}

// The state before each step, [b, t, h]: zeros before the first.
extern "C" __global__ void states_before(const OPERAND *y, OPERAND *before, i64 count, i64 steps, i64 hidden) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) before[at] = at / hidden % steps > 0 ? y[at - hidden] : from_float<OPERAND>(0.0f);
}
#endif
