// The states of recurrent layers in a step (kernels/recurrent.py): where each request's state is read, and after which
// tokens it is stored.
#pragma once

#include "vec.h"

namespace penstock::ISA {
namespace {

// One layer's states and the step's requests. A block holds `state_size` numbers; tables count blocks from 1, and have
// 0 or less where there is none. The last three are null without drafts.
struct States {
    float* memory;  // [blocks, state_size]
    const int32_t* table;
    int64_t table_stride;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    int64_t requests;
    int64_t block_size;
    int64_t state_size;
    const int64_t* rows;         // [requests]: the place of a request's pending inputs
    const int32_t* num_pending;  // [requests]: accepted drafts that the state does not contain yet
    const int32_t* num_drafts;   // [requests]: the last of the step's tokens, which the state must not contain yet
};

// One request: its pending tokens, then those of the step. Tokens are counted from the first pending one.
class Span {
public:
    Span(const States& states, int64_t request)
        : states_(states),
          table_(states.table + request * states.table_stride),
          first_row(states.query_start_loc[request]),
          pending(states.num_pending ? states.num_pending[request] : 0),
          count(states.query_start_loc[request + 1] - first_row + pending),
          drafts(states.num_drafts ? states.num_drafts[request] : 0),
          start_(states.seq_lens[request] - count) {}

    bool is_empty() const { return count == pending; }

    // The state before the first token; null for the one before all tokens, which is zero.
    const float* before() const { return start_ > 0 ? at(start_ - 1) : nullptr; }

    // Where to store the state after token `t`; null if it is not kept.
    float* after(int64_t t) const {
        const int64_t last = count - drafts - 1;
        if (t > last || (t < last && (start_ + t + 1) % states_.block_size)) return nullptr;
        return at(start_ + t);
    }

private:
    float* at(int64_t position) const {
        const int32_t block = table_[position / states_.block_size];
        return block > 0 ? states_.memory + (block - 1) * states_.state_size : nullptr;
    }

    const States& states_;
    const int32_t* table_;

public:
    const int64_t first_row;  // of the step
    const int64_t pending;
    const int64_t count;
    const int64_t drafts;

private:
    const int64_t start_;  // the first token's position
};

// A causal convolution over channels: out = sum of taps times inputs, the oldest first. A history is [taps - 1, channels],
// the oldest input first, zero before the first token.
class Convolution {
public:
    // `taps` weights for each of `stride` channels, [taps, stride].
    Convolution(const float* weights, int64_t taps, int64_t stride) : weights_(weights), taps_(taps), stride_(stride) {}

    // Calls write(i, out) for each sixteen of the first `width` channels: out is their sum at token `t`. inputs(t, i)
    // returns a token's inputs, channel(i) their place in the weights. `history` may be null.
    template <class Inputs, class Channel, class Write>
    void run(const float* history, int64_t history_stride, int64_t t, int64_t width, const Inputs& inputs, const Channel& channel,
             const Write& write) const {
        for (int64_t i = 0; i < width; i += kLanes) {
            const float* weight = weights_ + channel(i);
            Vec out = splat(0);
            for (int64_t tap = 0, token = t - taps_ + 1; tap < taps_; ++tap, ++token, weight += stride_) {
                Vec x = splat(0);
                if (token >= 0)
                    x = inputs(token, i);
                else if (history)
                    x = load(history + (taps_ - 1 + token) * history_stride + i);
                out = tap ? fma(x, load(weight), out) : x * load(weight);
            }
            write(i, out);
        }
    }

    static constexpr int64_t kMostTaps = 8;

private:
    const float* weights_;
    const int64_t taps_, stride_;
};

// The history after token `t`, from the one before the first token (null: zero) and the tokens' inputs: calls
// copy(to, t) for those of a token, `to` being its place.
template <class Copy>
void store_history(const float* before, float* after, int64_t taps, int64_t channels, int64_t t, const Copy& copy) {
    for (int64_t i = 0; i + 1 < taps; ++i) {
        const int64_t token = t - (taps - 2) + i;
        float* to = after + i * channels;
        if (token >= 0)
            copy(to, token);
        else if (before)
            std::memcpy(to, before + (taps - 1 + token) * channels, channels * sizeof(float));
        else
            std::memset(to, 0, channels * sizeof(float));
    }
}

}  // namespace
}  // namespace penstock::ISA
