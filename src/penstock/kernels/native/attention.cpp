// Paged attention with one arithmetic for prefill, chunked prefill, decode and verification.
//
// A query row walks over the tiles of keys it sees in ascending order, each tile kTile keys that begin at a multiple of
// kTile, with one online softmax; nothing in the walk depends on other rows, on where blocks lie or on the threads. A tile
// that a row does not see at all leaves its state as it is, bit for bit, so rows that share a work item may begin and end
// at different tiles.
#include "attention_bf16.h"
#include "attention_float.h"

namespace penstock::ISA {
namespace {

struct Attention {
    const void* q;                   // [T, num_heads, head_dim], rows q_stride elements apart
    const void* kv_cache;            // [num_blocks, 2, num_kv_heads, block_size, head_dim]
    const int32_t* block_table;      // [R, table_stride]
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* seq_lens;         // [R]
    void* out;                       // [T, num_heads * head_dim]
    int64_t q_stride, table_stride, tokens, requests, num_heads, num_kv_heads, head_dim, block_size, window;
    float scale;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t query_len(int64_t request) const { return query_start_loc[request + 1] - query_start_loc[request]; }
    int64_t items(int64_t request) const {
        return (query_len(request) * group() + kRows - 1) / kRows * num_kv_heads;
    }
};

// Consecutive query rows of one request and one KV head; the heads of a token that share the KV head are neighbours.
struct Item {
    int64_t request, kv_head, first_row;
};

// Finds the item of an index, for indices that only grow.
class Items {
public:
    explicit Items(const Attention& attention) : attention_(attention) {}

    Item at(int64_t index) {
        while (index >= first_ + attention_.items(request_)) first_ += attention_.items(request_++);
        const int64_t within = index - first_, heads = attention_.num_kv_heads;
        // The last rows of a prompt see most keys and are taken first, so that threads end together.
        const int64_t part = attention_.items(request_) / heads - 1 - within / heads;
        return {request_, within % heads, part * kRows};
    }

private:
    const Attention& attention_;
    int64_t request_ = 0, first_ = 0;
};

// One row's softmax so far: the largest score, and its denominator as kLanes partial sums.
struct RowState {
    float largest;
    Vec denominator;
};

// Takes the scores s [kTile] of one row, of which it sees the keys [from, to), into the softmax: leaves the weights of the
// tile and rescales acc [padded_dim].
template <class Weight>
inline void softmax_row(const float* s, int from, int to, float scale_log2e, RowState& state, Weight* weights, float* acc,
                        int64_t padded_dim) {
    constexpr int kVectors = kTile / kLanes;
    Vec x[kVectors];
    for (int i = 0; i < kVectors; ++i) x[i] = load(s + i * kLanes);
    if (from > 0 || to < kTile)
        for (int i = 0; i < kVectors; ++i) x[i] = keep_lanes(x[i], from - i * kLanes, to - i * kLanes);
    Vec top = x[0];
    for (int i = 1; i < kVectors; ++i) top = larger(top, x[i]);
    const float tile_largest = largest(top);
    if (tile_largest > state.largest) {
        const float rescale = first_lane(exp2(splat((state.largest - tile_largest) * scale_log2e)));
        state.denominator = state.denominator * splat(rescale);
        for (int64_t d = 0; d < padded_dim; d += kLanes) store(acc + d, load(acc + d) * splat(rescale));
        state.largest = tile_largest;
    }
    // Minus infinity until the row has seen a key: zero then keeps the differences below from being NaN.
    const Vec shift = splat(state.largest == -INFINITY ? 0.0f : -state.largest * scale_log2e);
    Vec total = splat(0);
    for (int i = 0; i < kVectors; ++i) {
        const Vec weight = exp2(fma(x[i], splat(scale_log2e), shift));
        total = total + weight;
        store(weights + i * kLanes, weight);
    }
    state.denominator = state.denominator + total;
}

// Computes work items, one after the other, on one thread.
template <class Engine>
class Worker {
public:
    using T = typename Engine::Storage;

    static size_t bytes(const Attention& a) {
        const Shape shape{a.head_dim, a.block_size};
        return Engine::bytes(shape) + sizeof(float) * (kRows * shape.padded_dim() + kGroup * kTile) + 2 * 64;
    }

    explicit Worker(const Attention& attention)
        : a_(attention),
          arena_(bytes(attention)),
          engine_(arena_, Shape{a_.head_dim, a_.block_size}),
          padded_dim_(Shape{a_.head_dim, a_.block_size}.padded_dim()),
          acc_(arena_.zeros<float>(kRows * padded_dim_)),
          scores_(arena_.zeros<float>(kGroup * kTile)) {}

    void run(const Item& item) {
        begin(item);
        const int64_t first_key = from_[0], last_key = to_[count_ - 1];
        int64_t start = first_key / kTile * kTile;
        KVTile<T> tile = locate(item, start, first_key, last_key);
        for (; start < last_key; start += kTile) {
            const bool more = start + kTile < last_key;
            const KVTile<T> next = more ? locate(item, start + kTile, first_key, last_key) : tile;
            engine_.set_tile(tile, Prefetch<T>(more ? &next : nullptr, a_.head_dim));
            for (int group = 0; group * kGroup < count_; ++group) visit(group, start);
            tile = next;
        }
        finish(item);
    }

private:
    void begin(const Item& item) {
        const int64_t group = a_.group(), query_len = a_.query_len(item.request);
        const int64_t left = query_len * group - item.first_row;
        count_ = static_cast<int>(left < kRows ? left : kRows);
        const T* rows[kRows];
        for (int i = 0; i < count_; ++i) {
            const int64_t query = (item.first_row + i) / group, head = (item.first_row + i) % group;
            const int64_t token = a_.query_start_loc[item.request] + query;
            const int64_t position = a_.seq_lens[item.request] - query_len + query;
            rows[i] = static_cast<const T*>(a_.q) + token * a_.q_stride + (item.kv_head * group + head) * a_.head_dim;
            from_[i] = a_.window && position >= a_.window ? position - a_.window + 1 : 0;
            to_[i] = position + 1;
            state_[i] = {-INFINITY, splat(0)};
        }
        engine_.set_queries(rows, count_);
        std::memset(acc_, 0, count_ * padded_dim_ * sizeof(float));
    }

    // The tile that begins at key `start`, for rows that see keys in [first_key, last_key). Blocks without such a key are
    // never looked at: with a window they may have been given back.
    KVTile<T> locate(const Item& item, int64_t start, int64_t first_key, int64_t last_key) const {
        KVTile<T> tile;
        tile.begin = static_cast<int>(first_key > start ? first_key - start : 0);
        tile.end = static_cast<int>(last_key - start < kTile ? last_key - start : kTile);
        const int32_t* blocks = a_.block_table + item.request * a_.table_stride;
        const int64_t head_size = a_.block_size * a_.head_dim, values = a_.num_kv_heads * head_size;
        const T* cache = static_cast<const T*>(a_.kv_cache) + item.kv_head * head_size;
        const int width = a_.block_size % (2 * kSpan) == 0 ? 2 * kSpan : kSpan;
        for (int key = 0; key < kTile; key += width) {
            const bool seen = key < tile.end && key + width > tile.begin;
            const int64_t block = seen ? (start + key) / a_.block_size : 0;
            const int64_t offset = start + key - block * a_.block_size;
            const T* at = seen ? cache + blocks[block] * 2 * values + offset * a_.head_dim : nullptr;
            for (int i = key / kSpan; i < (key + width) / kSpan; ++i, at += seen ? kSpan * a_.head_dim : 0) {
                tile.keys[i] = at;
                tile.values[i] = seen ? at + values : nullptr;
            }
        }
        return tile;
    }

    // Takes the current tile into the rows of one group.
    void visit(int group, int64_t start) {
        const int first = group * kGroup, last = first + kGroup < count_ ? first + kGroup : count_;
        if (to_[last - 1] <= start || from_[first] >= start + kTile) return;
        engine_.scores(group, scores_);
        float* acc = acc_ + first * padded_dim_;
        for (int row = first; row < last; ++row) {
            const int64_t from = from_[row] - start, to = to_[row] - start;
            softmax_row(scores_ + (row - first) * kTile, from < 0 ? 0 : from > kTile ? kTile : static_cast<int>(from),
                        to < 0 ? 0 : to > kTile ? kTile : static_cast<int>(to), a_.scale * 1.44269504f, state_[row],
                        engine_.weights() + (row - first) * kTile, acc + (row - first) * padded_dim_, padded_dim_);
        }
        engine_.accumulate(group, acc);
    }

    void finish(const Item& item) const {
        const int64_t group = a_.group();
        for (int i = 0; i < count_; ++i) {
            const int64_t row = item.first_row + i, token = a_.query_start_loc[item.request] + row / group;
            const int64_t head = item.kv_head * group + row % group;
            T* out = static_cast<T*>(a_.out) + (token * a_.num_heads + head) * a_.head_dim;
            const Vec inverse = splat(1.0f / sum(state_[i].denominator));
            // Weights of zero may have turned -0 into +0: adding +0 makes them one.
            for (int64_t d = 0; d < a_.head_dim; d += kLanes)
                store_first(out + d, load(acc_ + i * padded_dim_ + d) * inverse + splat(0), a_.head_dim - d);
        }
    }

    const Attention& a_;
    Arena arena_;
    Engine engine_;
    const int64_t padded_dim_;
    float* const acc_;     // [kRows, padded_dim]
    float* const scores_;  // [kGroup, kTile]
    int count_ = 0;
    int64_t from_[kRows], to_[kRows];  // the keys [from, to) that a row sees
    RowState state_[kRows];
};

template <class Engine>
void attend(const Attention& attention) {
    int64_t items = 0;
    for (int64_t request = 0; request < attention.requests; ++request) items += attention.items(request);
    const int64_t row_bytes = attention.num_heads * attention.head_dim * sizeof(typename Engine::Storage);
    const int64_t used = attention.query_start_loc[attention.requests];
    std::memset(static_cast<char*>(attention.out) + used * row_bytes, 0, (attention.tokens - used) * row_bytes);
#pragma omp parallel if (items > 1)
    {
        Worker<Engine> worker(attention);
        Items walk(attention);
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t index = 0; index < items; ++index) worker.run(walk.at(index));
    }
}

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

PENSTOCK_EXPORT(void, paged_attention)
(const void* q, int64_t q_stride, const void* kv_cache, const int32_t* block_table, int64_t table_stride,
 const int32_t* query_start_loc, const int32_t* seq_lens, void* out, int64_t tokens, int64_t requests, int64_t num_heads,
 int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window, float scale, int32_t dtype) {
    const Attention attention{q,       kv_cache,     block_table, query_start_loc, seq_lens, out,
                              q_stride, table_stride, tokens,      requests,        num_heads, num_kv_heads,
                              head_dim, block_size,   window,      scale};
    switch (dtype) {
        case kFloat32: return attend<FloatEngine<float>>(attention);
        case kFloat16: return attend<FloatEngine<f16>>(attention);
#if defined(__AVX512BF16__)
        case kBFloat16: return attend<BFloat16Engine>(attention);
#else
        case kBFloat16: return attend<FloatEngine<bf16>>(attention);
#endif
    }
}
