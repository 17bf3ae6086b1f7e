// Paged attention with one arithmetic for prefill, chunked prefill, decode and verification.
//
// A query row processes the tiles of keys it sees in ascending order, each tile kTile keys that begin at a multiple of
// kTile, with one online softmax for each range, kRange keys that begin at a multiple of kRange; the results of the ranges
// are merged in ascending order. Nothing in this depends on other rows, on the location of blocks or on the threads, which
// may compute the ranges of a row at the same time. A tile or range that a row does not see at all leaves its state
// unchanged but for the sign of zeros, so rows that share a work item may begin and end at different ones. A sink is added
// to the denominator after the last range.
#include "attention_bf16.h"
#include "attention_float.h"
#include "pool.h"
#include "scratch.h"

namespace penstock::ISA {
namespace {

constexpr int64_t kRange = 1024;
static_assert(kRange % kTile == 0, "ranges consist of whole tiles");

struct Attention {
    const void* q;                   // [T, num_heads, head_dim], rows q_stride elements apart
    const void* kv_cache;            // [num_blocks, planes, num_kv_heads, block_size], each a row of head_dim numbers
    const int32_t* block_table;      // [R, table_stride]
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* seq_lens;         // [R]
    const float* sinks;              // [num_heads], or null
    void* out;                       // [T, num_heads * value_dim]
    int64_t q_stride, table_stride, tokens, requests, num_heads, num_kv_heads, head_dim, value_dim, block_size, window,
        threads;
    float scale, softcap;  // scores are scale q k^T; with a softcap > 0, softcap tanh(scale / softcap q k^T)
    bool causal;  // else every row sees later keys of its request too; with a window, as many as earlier ones
    bool latent;  // one plane, whose keys end in their values; else keys and values are two planes
    bool in_pairs;
    int64_t groups = kGroups;  // of an item, at most

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t query_len(int64_t request) const { return query_start_loc[request + 1] - query_start_loc[request]; }
    Shape shape() const { return {head_dim, value_dim, block_size, groups, in_pairs}; }
    // Of the numbers that softmax takes: products of queries and keys, or their hyperbolic tangents.
    float scale_log2e() const { return (softcap > 0 ? softcap : scale) * 1.44269504f; }
};

// Part of one request: consecutive query rows of one KV head, or a few rows of each of several KV heads. The query
// heads of a token that share a KV head are adjacent rows.
struct Item {
    int64_t request, first_head, heads, first_row, last_row;  // rows [first_row, last_row) of every head
    int64_t first_key, last_key;  // it has no other keys than [first_key, last_key)
    int64_t part, parts;          // number `part` of so many items, one range each, with these rows
};

// Finds the item of an index, for indices that only grow.
class Items {
public:
    Items(const Attention& attention, int64_t threads) : attention_(attention), most_groups_(attention.groups) {
        // Heads of a block are adjacent, and are best read one after the other, but every thread should have some.
        most_heads_ = (attention.num_kv_heads * attention.requests + threads - 1) / threads;
        for (; most_groups_ > kGroups; most_groups_ /= 2)
            if (is_even(threads) && total_ >= kItemsPerThread * threads) return;
        if (is_even(threads)) return;
        most_groups_ = kGroups / 2;
        if (is_even(threads)) return;
        divides_ranges_ = true;
        count_all();
    }

    int64_t total() const { return total_; }

    // Most rows of an item that has only one range of its rows; 0: there is no such item.
    int64_t most_divided_rows() const {
        int64_t most = 0;
        for (int64_t request = 0; request < attention_.requests; ++request)
            if (ranges(request) > 1) {
                const int64_t all = heads_at_once(request) * rows(request);
                const int64_t now = all < most_rows() ? all : most_rows();
                most = now > most ? now : most;
            }
        return most;
    }

    // Of all heads.
    int64_t num_groups(int64_t request) const {
        return (rows(request) + kGroup - 1) / kGroup * attention_.num_kv_heads;
    }

    Item at(int64_t index) {
        while (index >= first_ + count(request_)) first_ += count(request_++);
        const int64_t heads = heads_at_once(request_), count = parts(request_), divided = ranges(request_);
        const int64_t part = (index - first_) % divided, within = (index - first_) / divided;
        const int64_t columns = (attention_.num_kv_heads + heads - 1) / heads;
        const int64_t first_head = within % columns * heads, left = attention_.num_kv_heads - first_head;
        const int64_t first_key = divided > 1 ? (first_range(request_) + part) * kRange : 0;
        const int64_t last_key = divided > 1 ? first_key + kRange : attention_.seq_lens[request_];
        // The last rows of a prompt see most keys and are taken first, so that threads finish together.
        const int64_t first_row = (count - 1 - within / columns) * most_rows(), last_row = first_row + most_rows();
        const int64_t rows = this->rows(request_);
        return {request_,  first_head, left < heads ? left : heads, first_row, last_row < rows ? last_row : rows,
                first_key, last_key,   part,                        divided};
    }

private:
    // Fewer items than this are divided further.
    static constexpr int64_t kItemsPerThread = 4;

    void count_all() {
        total_ = 0;
        for (int64_t request = 0; request < attention_.requests; ++request) total_ += count(request);
    }
    // Counts the items: no thread would have many more of them than others.
    bool is_even(int64_t threads) {
        count_all();
        return total_ >= kItemsPerThread * threads || total_ % threads == 0;
    }

    int64_t count(int64_t request) const {
        const int64_t heads = heads_at_once(request);
        return parts(request) * ((attention_.num_kv_heads + heads - 1) / heads) * ranges(request);
    }
    int64_t first_range(int64_t request) const {
        const int64_t first = attention_.seq_lens[request] - attention_.query_len(request) - attention_.window + 1;
        return attention_.window && first > 0 ? first / kRange : 0;
    }
    int64_t ranges(int64_t request) const {
        if (!divides_ranges_) return 1;
        return (attention_.seq_lens[request] + kRange - 1) / kRange - first_range(request);
    }
    int64_t rows(int64_t request) const { return attention_.query_len(request) * attention_.group(); }
    int64_t most_rows() const { return most_groups_ * kGroup; }
    int64_t parts(int64_t request) const { return (rows(request) + most_rows() - 1) / most_rows(); }
    int64_t heads_at_once(int64_t request) const {
        if (rows(request) > kGroup) return 1;
        return most_heads_ < most_groups_ ? most_heads_ : most_groups_;
    }

    const Attention& attention_;
    int64_t most_heads_, most_groups_, total_ = 0, request_ = 0, first_ = 0;  // groups: of an item
    bool divides_ranges_ = false;
};

// The running softmax of a group's rows: the largest score, and its denominator as kLanes partial sums.
struct SoftmaxState {
    alignas(64) float largest[kGroup];
    Vec denominator[kGroup];

    void reset() {
        for (int row = 0; row < kGroup; ++row) {
            largest[row] = kNothingSeen;
            denominator[row] = splat(0);
        }
    }

    // Below every score, and still finite: differences from it are not NaN.
    static constexpr float kNothingSeen = -1e30f;
};

// The scores s [kTile] of one row, minus infinity except for the keys [from, to).
PENSTOCK_INLINE void load_scores(const float* s, int from, int to, Vec (&x)[kTile / kLanes]) {
    for (int i = 0; i < kTile / kLanes; ++i) x[i] = load(s + i * kLanes);
    if (from > 0 || to < kTile)
        for (int i = 0; i < kTile / kLanes; ++i) x[i] = keep_lanes(x[i], from - i * kLanes, to - i * kLanes);
}

// Adds the scores s [rows, kTile], of which row i sees the keys [from[i], to[i]), to the softmax: writes the weights
// [rows, kTile] of the tile and rescales acc [rows, padded_dim].
template <class Weight>
void softmax(const float* s, int rows, const int* from, const int* to, float scale_log2e, SoftmaxState& state,
             Weight* weights, float* acc, int64_t padded_dim) {
    Vec x[kTile / kLanes];
    alignas(64) float top[kGroup], rescale[kGroup];
    for (int row = 0; row < kGroup; ++row) top[row] = state.largest[row];
    for (int row = 0; row < rows; ++row) {
        load_scores(s + row * kTile, from[row], to[row], x);
        for (int i = 1; i < kTile / kLanes; ++i) x[0] = larger(x[0], x[i]);
        top[row] = largest(x[0]);
    }
    for (int row = 0; row < kGroup; row += kLanes) {
        const Vec before = load(state.largest + row), now = larger(before, load(top + row));
        store(rescale + row, exp2((before - now) * splat(scale_log2e)));
        store(state.largest + row, now);
    }
    for (int row = 0; row < rows; ++row) {
        if (rescale[row] != 1.0f) {
            const Vec factor = splat(rescale[row]);
            state.denominator[row] = state.denominator[row] * factor;
            for (int64_t d = 0; d < padded_dim; d += kLanes)
                store(acc + row * padded_dim + d, load(acc + row * padded_dim + d) * factor);
        }
        const Vec shift = splat(-state.largest[row] * scale_log2e);
        load_scores(s + row * kTile, from[row], to[row], x);
        Vec total = splat(0);
        for (int i = 0; i < kTile / kLanes; ++i) {
            const Vec weight = exp2(fma(x[i], splat(scale_log2e), shift));
            total = total + weight;
            store(weights + row * kTile + i * kLanes, weight);
        }
        state.denominator[row] = state.denominator[row] + total;
    }
}

// Adds the result of a range to that of all ranges before it: each the largest score of a row, its denominator and acc.
// It runs once per range; inlined by force it slows down the loop over tiles around it.
inline void merge(const float largest, const Vec denominator, const float* acc, float scale_log2e, float& total_largest,
                  Vec& total_denominator, float* total, int64_t padded_dim) {
    const float now = total_largest > largest ? total_largest : largest;
    const Vec before = exp2(splat(total_largest - now) * splat(scale_log2e));
    const Vec here = exp2(splat(largest - now) * splat(scale_log2e));
    total_largest = now;
    total_denominator = fma(total_denominator, before, denominator * here);
    for (int64_t d = 0; d < padded_dim; d += kLanes)
        store(total + d, fma(load(total + d), before, load(acc + d) * here));
}

// Computes work items, one after the other, on one thread.
template <class Engine>
class Worker {
public:
    using T = typename Engine::Storage;
    using C = typename Engine::Cached;

    static size_t bytes(const Attention& a) {
        const int64_t numbers = a.groups * kGroup * (2 * a.shape().padded_dim() + kTile);
        return Engine::bytes(a.shape()) + sizeof(float) * numbers + 3 * 64;
    }

    // Numbers of a row's result of one range: its largest score, in a vector, the denominator and acc.
    static int64_t partial_size(const Attention& a) { return 2 * kLanes + a.shape().padded_dim(); }

    explicit Worker(const Attention& attention)
        : a_(attention),
          arena_(bytes(attention)),
          engine_(arena_, a_.shape()),
          padded_dim_(a_.shape().padded_dim()),
          acc_(arena_.room<float>(a_.groups * kGroup * padded_dim_)),
          total_(arena_.room<float>(a_.groups * kGroup * padded_dim_)),
          scores_(arena_.room<float>(a_.groups * kGroup * kTile)) {}

    // `partials` has room for the rows of an item that has one range of several.
    void run(const Item& item, float* partials) {
        begin(item);
        const int64_t from = groups_[0].from[0], to = groups_[count_ - 1].to[groups_[count_ - 1].rows - 1];
        const int64_t first_key = from > item.first_key ? from : item.first_key;
        const int64_t last_key = to < item.last_key ? to : item.last_key;
        const Keys keys{item.request, first_key, last_key};
        KVTiles<C> tiles = locate(keys, first_key / kTile * kTile, item);
        for (int64_t start = first_key / kTile * kTile; start < last_key; start += kTile) {
            const bool more = start + kTile < last_key;
            KVTiles<C> next;
            if (more) next = locate(keys, start + kTile, item);
            // With several groups per head, computation dominates the time.
            const bool reads = count_ == item.heads;
            for (int64_t head = 0; head < item.heads; ++head) {
                const KVTile<C> tile = tiles.of(head);
                Prefetch<C> prefetch;
                if (reads)
                    prefetch = Prefetch<C>(tiles, head, more ? &next : nullptr, a_.head_dim, engine_.multiplies_in_place());
                engine_.set_tile(tile, prefetch);
                visit(item.first_head + head, start);
            }
            if (more) tiles = next;
            if (item.parts == 1 && ((start + kTile) % kRange == 0 || !more)) merge_range(more);
        }
        if (item.parts == 1)
            finish(item);
        else
            store_range(partials);
    }

    // Merges the ranges of an item's rows, `stride` numbers apart, the first of which is at `partials`.
    void run_merge(const Item& item, const float* partials, int64_t stride) {
        begin(item);
        std::memset(total_, 0, count_ * kGroup * padded_dim_ * sizeof(float));
        for (int64_t part = 0; part < item.parts; ++part) {
            const float* from = partials + part * stride;
            for (int index = 0; index < count_; ++index)
                for (int row = 0; row < groups_[index].rows; ++row, from += partial_size(a_))
                    merge_row(index, row, from[0], load(from + kLanes), from + 2 * kLanes);
        }
        finish(item);
    }

private:
    // The keys [first, last) of a request are seen by some row of the item.
    struct Keys {
        int64_t request, first, last;
    };

    // Rows that process a tile together, all of one KV head.
    struct Group {
        int64_t kv_head, first_row;
        int rows;
        int64_t from[kGroup], to[kGroup];  // the keys [from, to) that a row sees, ascending with the row
        SoftmaxState softmax, total;       // of the current range; of all ranges before it
    };

    void begin(const Item& item) {
        count_ = 0;
        for (int64_t head = item.first_head; head < item.first_head + item.heads; ++head)
            for (int64_t row = item.first_row; row < item.last_row; row += kGroup) {
                Group& group = groups_[count_];
                group.kv_head = head;
                group.first_row = row;
                group.rows = static_cast<int>(item.last_row - row < kGroup ? item.last_row - row : kGroup);
                begin(item.request, group, count_++);
            }
        std::memset(acc_, 0, count_ * kGroup * padded_dim_ * sizeof(float));
        has_total_ = false;
    }

    void begin(int64_t request, Group& group, int index) {
        const int64_t query_len = a_.query_len(request);
        const T* rows[kGroup];
        group.softmax.reset();
        group.total.reset();
        for (int i = 0; i < group.rows; ++i) {
            const int64_t query = (group.first_row + i) / a_.group();
            const int64_t position = a_.seq_lens[request] - query_len + query;
            rows[i] = static_cast<const T*>(a_.q) + (a_.query_start_loc[request] + query) * a_.q_stride +
                      query_head(group, i) * a_.head_dim;
            group.from[i] = a_.window && position >= a_.window ? position - a_.window + 1 : 0;
            const int64_t last = a_.window ? position + a_.window : a_.seq_lens[request];
            group.to[i] = a_.causal ? position + 1 : last < a_.seq_lens[request] ? last : a_.seq_lens[request];
        }
        engine_.set_queries(index, rows, group.rows);
    }

    int64_t query_head(const Group& group, int row) const {
        return group.kv_head * a_.group() + (group.first_row + row) % a_.group();
    }

    // The tiles that begin at key `start`. Blocks with no key that a row sees are never read: with a window they may
    // have been freed.
    KVTiles<C> locate(const Keys& keys, int64_t start, const Item& item) const {
        KVTiles<C> tiles;
        KVTile<C>& tile = tiles.first;
        tile.begin = static_cast<int>(keys.first > start ? keys.first - start : 0);
        tile.end = static_cast<int>(keys.last - start < kTile ? keys.last - start : kTile);
        const int32_t* blocks = a_.block_table + keys.request * a_.table_stride;
        const int64_t row = row_size<C>(a_.head_dim), head_size = a_.block_size * row, plane = a_.num_kv_heads * head_size;
        const int64_t values = a_.latent ? a_.head_dim - a_.value_dim : plane;
        const C* cache = static_cast<const C*>(a_.kv_cache) + item.first_head * head_size;
        const int width = a_.block_size % (2 * kSpan) == 0 ? 2 * kSpan : kSpan;
        for (int key = 0; key < kTile; key += width) {
            const bool seen = key < tile.end && key + width > tile.begin;
            const int64_t block = seen ? (start + key) / a_.block_size : 0;
            const int64_t offset = start + key - block * a_.block_size;
            const C* at = seen ? cache + blocks[block] * (a_.latent ? 1 : 2) * plane + offset * row : nullptr;
            for (int i = key / kSpan; i < (key + width) / kSpan; ++i, at += seen ? kSpan * row : 0) {
                tile.keys[i] = at;
                tile.values[i] = seen ? at + values : nullptr;
            }
        }
        tiles.heads = item.heads;
        tiles.head_stride = head_size;
        tiles.spans = width / kSpan;
        tiles.has_values = !a_.latent;
        return tiles;
    }

    // Adds the current tile to those groups of a KV head that see some of it. All of them take one step before the
    // next: reading right after writing would wait for the writes.
    void visit(int64_t kv_head, int64_t start) {
        int seen[kManyGroups], count = 0;
        for (int index = 0; index < count_; ++index) {
            const Group& group = groups_[index];
            if (group.kv_head == kv_head && group.to[group.rows - 1] > start && group.from[0] < start + kTile)
                seen[count++] = index;
        }
        for (int i = 0; i < count; ++i) engine_.scores(seen[i], groups_[seen[i]].rows, scores(seen[i]));
        for (int i = 0; i < count; ++i) weigh(seen[i], start);
        for (int i = 0; i < count; ++i) engine_.accumulate(seen[i], groups_[seen[i]].rows, acc(seen[i]));
    }

    // Makes weights of a group's scores.
    void weigh(int index, int64_t start) {
        Group& group = groups_[index];
        float* const s = scores(index);
        int from[kGroup], to[kGroup];
        for (int row = 0; row < group.rows; ++row) {
            from[row] = within_tile(group.from[row] - start);
            to[row] = within_tile(group.to[row] - start);
        }
        if (a_.softcap > 0) {
            const Vec factor = splat(a_.scale / a_.softcap);
            for (int i = 0; i < group.rows * kTile; i += kLanes) store(s + i, tanh(load(s + i) * factor));
        }
        softmax(s, group.rows, from, to, a_.scale_log2e(), group.softmax, engine_.weights(index), acc(index), padded_dim_);
    }

    float* scores(int index) const { return scores_ + index * kGroup * kTile; }
    float* acc(int index) const { return acc_ + index * kGroup * padded_dim_; }

    void merge_row(int index, int row, float largest, Vec denominator, const float* acc) {
        SoftmaxState& total = groups_[index].total;
        merge(largest, denominator, acc, a_.scale_log2e(), total.largest[row], total.denominator[row],
              total_ + (index * kGroup + row) * padded_dim_, padded_dim_);
    }

    // Merges the current range of all rows, and begins the next one if there are `more`.
    void merge_range(bool more) {
        for (int index = 0; index < count_ && has_total_; ++index)
            for (int row = 0; row < groups_[index].rows; ++row)
                merge_row(index, row, groups_[index].softmax.largest[row], groups_[index].softmax.denominator[row],
                          acc_ + (index * kGroup + row) * padded_dim_);
        if (!has_total_) {
            float* const range = acc_;
            acc_ = total_;
            total_ = range;
            for (int index = 0; index < count_; ++index) groups_[index].total = groups_[index].softmax;
            has_total_ = true;
        }
        if (!more) return;
        for (int index = 0; index < count_; ++index) groups_[index].softmax.reset();
        std::memset(acc_, 0, count_ * kGroup * padded_dim_ * sizeof(float));
    }

    void store_range(float* to) const {
        for (int index = 0; index < count_; ++index)
            for (int row = 0; row < groups_[index].rows; ++row, to += partial_size(a_)) {
                store(to, splat(groups_[index].softmax.largest[row]));
                store(to + kLanes, groups_[index].softmax.denominator[row]);
                std::memcpy(to + 2 * kLanes, acc_ + (index * kGroup + row) * padded_dim_, padded_dim_ * sizeof(float));
            }
    }

    static int within_tile(int64_t key) { return key < 0 ? 0 : key > kTile ? kTile : static_cast<int>(key); }

    void finish(const Item& item) const {
        for (int index = 0; index < count_; ++index)
            for (int i = 0; i < groups_[index].rows; ++i) {
                const Group& group = groups_[index];
                const int64_t token = a_.query_start_loc[item.request] + (group.first_row + i) / a_.group();
                T* out = static_cast<T*>(a_.out) + (token * a_.num_heads + query_head(group, i)) * a_.value_dim;
                const float* acc = total_ + (index * kGroup + i) * padded_dim_;
                const Vec inverse = splat(1.0f / denominator(group, i));
                // Weights of zero may have turned -0 into +0: adding +0 makes them one.
                for (int64_t d = 0; d < a_.value_dim; d += kLanes)
                    store_first(out + d, load(acc + d) * inverse + splat(0), a_.value_dim - d);
            }
    }

    // Of a row whose ranges have been merged.
    float denominator(const Group& group, int row) const {
        const float keys = sum(group.total.denominator[row]);
        if (!a_.sinks) return keys;
        const float sink = a_.sinks[query_head(group, row)] * 1.44269504f;
        return keys + first_lane(exp2(splat(sink - group.total.largest[row] * a_.scale_log2e())));
    }

    const Attention& a_;
    Arena arena_;
    Engine engine_;
    const int64_t padded_dim_;
    float* acc_;     // [groups, kGroup, padded_dim]: of the current range
    float* total_;   // likewise, of all ranges before it
    bool has_total_ = false;
    float* const scores_;  // [groups, kGroup, kTile]
    int count_ = 0;  // groups of the current item
    Group groups_[kManyGroups];
};

// About how long a thread takes for a key of one head, for one group of rows.
constexpr int64_t kNanosecondsPerKey = 32;

int64_t useful_threads(const Attention& attention) {
    const Items work(attention, 1);
    int64_t keys = 0;
    for (int64_t request = 0; request < attention.requests; ++request)
        keys += work.num_groups(request) * attention.seq_lens[request];
    return penstock_useful_threads(keys * kNanosecondsPerKey, attention.threads);
}

thread_local Scratch partials;

template <class Engine>
void attend(Attention attention) {
    for (int64_t request = 0; request < attention.requests; ++request)
        if (attention.head_dim <= kManyDims && attention.query_len(request) * attention.group() > kGroups * kGroup)
            attention.groups = kManyGroups;
    const int64_t threads = useful_threads(attention);
    const Items work(attention, threads);
    const int64_t row_bytes = attention.num_heads * attention.value_dim * sizeof(typename Engine::Storage);
    const int64_t used = attention.query_start_loc[attention.requests];
    std::memset(static_cast<char*>(attention.out) + used * row_bytes, 0, (attention.tokens - used) * row_bytes);
    const int64_t rows = work.most_divided_rows(), stride = rows * Worker<Engine>::partial_size(attention);
    float* const memory = reinterpret_cast<float*>(partials.reserve(work.total() * stride * sizeof(float)));
    const auto run_items = [&](const auto& run) {
        int64_t next = 0;
        const auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
        run_parts(threads, threads, [&](int64_t) {
            Worker<Engine> worker(attention);
            Items walk(work);
            for (int64_t index = take(); index < work.total(); index = take())
                run(worker, walk.at(index), memory + index * stride);
        });
    };
    run_items([](auto& worker, const Item& item, float* partial) { worker.run(item, partial); });
    if (rows == 0) return;
    run_items([&](auto& worker, const Item& item, float* partial) {
        if (item.parts > 1 && item.part == 0) worker.run_merge(item, partial, stride);
    });
}

template <class AsStored, class Integers>
void attend(const Attention& attention, bool has_int8_cache) {
    has_int8_cache ? attend<Integers>(attention) : attend<AsStored>(attention);
}

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

PENSTOCK_EXPORT(void, paged_attention)
(const void* q, int64_t q_stride, const void* kv_cache, const int32_t* block_table, int64_t table_stride,
 const int32_t* query_start_loc, const int32_t* seq_lens, const float* sinks, void* out, int64_t tokens,
 int64_t requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t value_dim, int64_t block_size,
 int64_t window, int64_t threads, float scale, float softcap, int32_t dtype, int32_t causal, int32_t latent,
 int32_t has_int8_cache, int32_t in_pairs) {
    const Attention attention{q,         kv_cache,    block_table,  query_start_loc, seq_lens,  sinks,
                              out,       q_stride,    table_stride, tokens,          requests,  num_heads,
                              num_kv_heads, head_dim, value_dim,    block_size,      window,    threads,
                              scale,     softcap,     causal != 0,  latent != 0, in_pairs != 0};
    switch (dtype) {
        case kFloat32: return attend<FloatEngine<float>, FloatEngine<float, int8_t>>(attention, has_int8_cache);
        case kFloat16: return attend<FloatEngine<f16>, FloatEngine<f16, int8_t>>(attention, has_int8_cache);
#if defined(__AVX512BF16__)
        case kBFloat16: return attend<BFloat16Engine, DequantizingEngine>(attention, has_int8_cache);
#else
        case kBFloat16: return attend<FloatEngine<bf16>, FloatEngine<bf16, int8_t>>(attention, has_int8_cache);
#endif
    }
}
PENSTOCK_RECORDABLE(paged_attention)
