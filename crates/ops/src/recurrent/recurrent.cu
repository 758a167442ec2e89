// One step of a recurrent layer, forward and back, beside its product with the recurrent weight. KIND is LSTM, GRU or RNN, GATES the
// rows of its weights for a unit. Legend in mod.rs. OPERAND is the element type of operands, states and gradients. A thread to a unit of
// a sample.

#define LSTM 0
#define GRU 1
#define RNN 2

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

#define SIZES i64 at_step, i64 steps, i64 batch, i64 hidden, int relu
#define PLACE \
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, sample = thread / hidden, unit = thread % hidden; \
    if (sample >= batch) return; \
    const i64 row = at_step * batch + sample, place = sample * steps + at_step, now = place * hidden + unit;

#ifdef FORWARD
// From the input's share of the gates [b, t, GATES·h] and the state's [b, GATES·h] (none before the first step; biases in neither), the
// gates, what the backward pass keeps beside them (cells, or the recurrent share of the candidate), and the states y[b, t, h].
extern "C" __global__ void step(
    const float *from_input, const float *from_state, const OPERAND *b_ih, const OPERAND *b_hh, OPERAND *y, OPERAND *gates, OPERAND *kept, SIZES) {
    PLACE
    float x[GATES], s[GATES];
    #pragma unroll
    for (int gate = 0; gate < GATES; gate++) {
        const i64 column = gate * hidden + unit;
        x[gate] = from_input[place * GATES * hidden + column] + to_float(b_ih[column]);
        s[gate] = (at_step > 0 ? from_state[sample * GATES * hidden + column] : 0.0f) + to_float(b_hh[column]);
    }
#if KIND == LSTM
    const float i = sigmoid(x[0] + s[0]), f = sigmoid(x[1] + s[1]), g = tanhf(x[2] + s[2]), o = sigmoid(x[3] + s[3]);
    const float before = at_step > 0 ? to_float(kept[(row - batch) * hidden + unit]) : 0.0f;
    const float cell = f * before + i * g;
    const float values[GATES] = {i, f, g, o};
    kept[row * hidden + unit] = from_float<OPERAND>(cell);
    y[now] = from_float<OPERAND>(o * tanhf(cell));
#elif KIND == GRU
    const float reset = sigmoid(x[0] + s[0]), update = sigmoid(x[1] + s[1]), candidate = tanhf(x[2] + reset * s[2]);
    const float before = at_step > 0 ? to_float(y[now - hidden]) : 0.0f;
    const float values[GATES] = {reset, update, candidate};
    kept[row * hidden + unit] = from_float<OPERAND>(s[2]);
    y[now] = from_float<OPERAND>((1.0f - update) * candidate + update * before);
#else
    const float sum = x[0] + s[0];
    y[now] = from_float<OPERAND>(relu ? (sum > 0.0f || sum != sum ? sum : 0.0f) : tanhf(sum));
#endif
#if KIND != RNN
    #pragma unroll
    for (int gate = 0; gate < GATES; gate++) gates[(row * GATES + gate) * hidden + unit] = from_float<OPERAND>(values[gate]);
#endif
}
#endif

#ifdef BACKWARD
#define KEEP(side, which, value) \
    { \
        to_##side[to + (which) * hidden] = from_float<OPERAND>(value); \
        float *const sum = side##_sums + own + (which) * hidden; \
        *sum = last ? (value) : *sum + (value); \
    }

// One step back. `to_input` and `to_state` [b, t, GATES·h] are the gradients of the gates' sums (one and the same but for a GRU's
// candidate); `d_next` [b, h] is what comes back through the recurrent weight from the step after; `carried` [b, h] is the gradient of the
// cells after (LSTM), or what of the state's gradient goes past the weight (GRU). `input_sums` and `state_sums` [b, GATES·h] are the sums
// of the gates' gradients over the steps so far, before they are rounded.
extern "C" __global__ void step_back(
    const float *d_next, const OPERAND *y, const OPERAND *gates, const OPERAND *kept, const OPERAND *g, OPERAND *to_input, OPERAND *to_state, float *input_sums, float *state_sums,
    float *carried, SIZES) {
    PLACE
    const i64 to = place * GATES * hidden + unit, own = sample * GATES * hidden + unit;
    const bool last = at_step + 1 == steps;
    const float next = last ? 0.0f : d_next[thread], after = last || KIND == RNN ? 0.0f : carried[thread];
#if KIND != RNN
    float gate[GATES];
    #pragma unroll
    for (int which = 0; which < GATES; which++) gate[which] = to_float(gates[(row * GATES + which) * hidden + unit]);
#endif
#if KIND == LSTM
    const float d_state = to_float(g[now]) + next;
    const float i = gate[0], f = gate[1], c = gate[2], o = gate[3];
    const float before = at_step > 0 ? to_float(kept[(row - batch) * hidden + unit]) : 0.0f;
    const float squashed = tanhf(to_float(kept[row * hidden + unit]));
    const float d_cell = after + d_state * o * (1.0f - squashed * squashed);
    const float made[GATES] = {
        d_cell * c * (i * (1.0f - i)), d_cell * before * (f * (1.0f - f)), d_cell * i * (1.0f - c * c),
        d_state * squashed * (o * (1.0f - o))};
    carried[thread] = d_cell * f;
    #pragma unroll
    for (int which = 0; which < GATES; which++) KEEP(state, which, made[which])
#elif KIND == GRU
    const float d_state = to_float(g[now]) + (next + after);
    const float reset = gate[0], update = gate[1], candidate = gate[2], share = to_float(kept[row * hidden + unit]);
    const float before = at_step > 0 ? to_float(y[now - hidden]) : 0.0f;
    const float d_candidate = d_state * (1.0f - update) * (1.0f - candidate * candidate);
    const float d_reset = d_candidate * share * (reset * (1.0f - reset));
    const float d_update = d_state * (before - candidate) * (update * (1.0f - update));
    carried[thread] = d_state * update;
    const float by_input[GATES] = {d_reset, d_update, d_candidate}, by_state[GATES] = {d_reset, d_update, d_candidate * reset};
    #pragma unroll
    for (int which = 0; which < GATES; which++) {
        KEEP(input, which, by_input[which])
        KEEP(state, which, by_state[which])
    }
#else
    const float d_state = to_float(g[now]) + next, state = to_float(y[now]);
    const float made = relu ? (state > 0.0f ? d_state : 0.0f) : d_state * (1.0f - state * state);
    KEEP(state, 0, made)
#endif
}

// The state before each step, [b, t, h]: zeros before the first.
extern "C" __global__ void states_before(const OPERAND *y, OPERAND *before, i64 count, i64 steps, i64 hidden) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) before[at] = at / hidden % steps > 0 ? y[at - hidden] : from_float<OPERAND>(0.0f);
}
#endif
