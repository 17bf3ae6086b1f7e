// Adds the adapters of a layer to its output (kernels/lora.py).
#include "pool.h"
#include "vec.h"

namespace penstock::ISA {
namespace {

// The outputs of one adapter in blocks of kLanes. A block depends on some neighbouring ranks only: in a layer that has
// several projections, on those of its own.
struct Block {
    int64_t first, end;  // ranks
    int64_t offset;      // of its weights, [end - first, kLanes]
};

struct Adapter {
    const void* down;     // [inputs, ranks]
    const float* scales;  // [ranks]
    const void* up;
    const Block* blocks;  // [outputs / kLanes, rounded up]
    int64_t ranks;        // a multiple of kLanes; 0 where the slot's adapter does not change the layer
};

// The rows of a step that have adapters: each group's are of one adapter.
struct Groups {
    int64_t count;
    const int32_t* starts;  // [count + 1], in `rows`
    const int32_t* rows;
    const int32_t* slots;  // [count]
};

struct Site {
    const Adapter* adapters;  // [slots]
    const Groups* groups;
    int64_t inputs, outputs;
};

constexpr int64_t kMostRanks = 8 * 512, kChunk = 256, kChains = 4;
// How many sums are computed at once, each in a Vec: enough to hide the latency of an addition, and as many as the
// registers hold. Of inputs times ranks: rows, vectors of ranks, chains; of ranks times outputs: rows, blocks.
constexpr bool kHasWideRegisters = kRegisters == 1;
constexpr int64_t kMostRows = kHasWideRegisters ? 8 : 4, kMostVecs = kHasWideRegisters ? 3 : 1;
constexpr int64_t chains_at_once(int64_t rows) { return rows <= 2 ? 4 : kHasWideRegisters && rows == 4 ? 2 : 1; }
constexpr int64_t blocks_at_once(int64_t rows) { return !kHasWideRegisters ? 1 : rows <= 2 ? 4 : 2; }

// Weights are read once, in the order of memory, from one piece of an adapter to another: too little in a row for the
// processor to fetch in time.
inline void fetch_ahead(const void* weights) { __builtin_prefetch(static_cast<const char*>(weights) + 2048); }

template <class T>
class Step {
public:
    Step(const Site& site, const T* x, int64_t x_stride, T* out) : site_(site), x_(x), x_stride_(x_stride), out_(out) {}

    void run(int64_t threads) const {
        const Groups& groups = *site_.groups;
        int64_t work = 0;
        for (int64_t group = 0; group < groups.count; ++group)
            work += (groups.starts[group + 1] - groups.starts[group]) * site_.adapters[groups.slots[group]].ranks;
        work = work * (site_.inputs + site_.outputs) / 32;
        if (!work) return;
        run_each(groups.count, work / groups.count, threads, [&](int64_t group) {
            const Adapter& adapter = site_.adapters[groups.slots[group]];
            const int32_t* row = groups.rows + groups.starts[group];
            const int32_t* const end = groups.rows + groups.starts[group + 1];
            for (; adapter.ranks && row < end; row += kMostRows) add_rows(adapter, row, end - row);
        });
    }

private:
    void add_rows(const Adapter& adapter, const int32_t* rows, int64_t count) const {
        if (count == 1) return add<1>(adapter, rows, 1);
        if (count == 2) return add<2>(adapter, rows, 2);
        if (count <= 4 || kMostRows == 4) return add<4>(adapter, rows, count < 4 ? count : 4);
        add<kMostRows>(adapter, rows, count < kMostRows ? count : kMostRows);
    }

    // Computes kRows rows, the last of `count` as often as there are others missing.
    template <int64_t kRows>
    void add(const Adapter& adapter, const int32_t* rows, int64_t count) const {
        int64_t row[kRows];
        for (int64_t i = 0; i < kRows; ++i) row[i] = rows[i < count ? i : count - 1];
        float inner[kRows][kMostRanks];
        for (int64_t rank = 0; rank < adapter.ranks; rank += kMostVecs * kLanes) {
            const int64_t vecs = (adapter.ranks - rank) / kLanes;
            if (vecs >= kMostVecs)
                shrink<kRows, kMostVecs>(adapter, row, rank, inner);
            else if (vecs == 2)
                shrink<kRows, kMostVecs < 2 ? kMostVecs : 2>(adapter, row, rank, inner);
            else
                shrink<kRows, 1>(adapter, row, rank, inner);
        }
        const int64_t blocks = (site_.outputs + kLanes - 1) / kLanes;
        constexpr int64_t kBlocks = blocks_at_once(kRows);
        for (int64_t block = 0; block < blocks;) {
            const Block* const next = adapter.blocks + block;
            bool are_alike = block + kBlocks <= blocks;
            for (int64_t b = 1; b < kBlocks && are_alike; ++b)
                are_alike = next[b].first == next->first && next[b].end == next->end;
            if (are_alike)
                expand<kRows, kBlocks>(adapter, row, count, block, inner);
            else
                expand<kRows, 1>(adapter, row, count, block, inner);
            block += are_alike ? kBlocks : 1;
        }
    }

    // kVecs vectors of ranks of `inner`. The inputs are added in kChains sums: input k to sum k % kChains.
    template <int64_t kRows, int64_t kVecs>
    void shrink(const Adapter& adapter, const int64_t (&row)[kRows], int64_t rank,
                float (&inner)[kRows][kMostRanks]) const {
        constexpr int64_t kTogether = chains_at_once(kRows);
        const int64_t ranks = adapter.ranks;
        const T* const down = static_cast<const T*>(adapter.down) + rank;
        Vec sums[kChains][kRows][kVecs];
        for (auto& of_chain : sums)
            for (auto& of_row : of_chain)
                for (Vec& sum : of_row) sum = splat(0);
        float x[kRows][kChunk];
        for (int64_t first = 0; first < site_.inputs; first += kChunk) {
            const int64_t count = site_.inputs - first < kChunk ? site_.inputs - first : kChunk;
            for (int64_t i = 0; i < kRows; ++i)
                for (int64_t k = 0; k < count; k += kLanes)
                    store(x[i] + k, load_first(x_ + row[i] * x_stride_ + first + k, count - k));
            for (int64_t chain = 0; chain < kChains; chain += kTogether) {
                Vec sum[kTogether][kRows][kVecs];
                std::memcpy(&sum, sums + chain, sizeof sum);
                int64_t k = chain;
                for (; k + kTogether <= count; k += kChains)
                    for (int64_t c = 0; c < kTogether; ++c)
                        add_input<kRows>(down + (first + k + c) * ranks, x, k + c, sum[c]);
                for (int64_t c = 0; c < kTogether; ++c)
                    if (k + c < count) add_input<kRows>(down + (first + k + c) * ranks, x, k + c, sum[c]);
                std::memcpy(sums + chain, &sum, sizeof sum);
            }
        }
        for (int64_t v = 0; v < kVecs; ++v) {
            const int64_t at = rank + v * kLanes;
            const Vec scale = load(adapter.scales + at);
            for (int64_t i = 0; i < kRows; ++i)
                store(inner[i] + at, ((sums[0][i][v] + sums[1][i][v]) + (sums[2][i][v] + sums[3][i][v])) * scale);
        }
    }

    template <int64_t kRows, int64_t kVecs>
    static void add_input(const T* weights, const float (&x)[kRows][kChunk], int64_t k, Vec (&sums)[kRows][kVecs]) {
        Vec weight[kVecs];
        for (int64_t v = 0; v < kVecs; ++v) weight[v] = load(weights + v * kLanes);
        fetch_ahead(weights);
        for (int64_t i = 0; i < kRows; ++i) {
            const Vec input = splat(x[i][k]);
            for (int64_t v = 0; v < kVecs; ++v) sums[i][v] = fma(input, weight[v], sums[i][v]);
        }
    }

    // Adds to kBlocks blocks of outputs, which depend on the same ranks.
    template <int64_t kRows, int64_t kBlocks>
    void expand(const Adapter& adapter, const int64_t (&row)[kRows], int64_t count, int64_t block,
                const float (&inner)[kRows][kMostRanks]) const {
        const int64_t first = adapter.blocks[block].first, end = adapter.blocks[block].end;
        const T* weights = static_cast<const T*>(adapter.up) + adapter.blocks[block].offset;
        const int64_t of_block = (end - first) * kLanes;
        Vec sums[kRows][kBlocks];
        for (auto& of_row : sums)
            for (Vec& sum : of_row) sum = splat(0);
        for (int64_t rank = first; rank < end; ++rank, weights += kLanes) {
            Vec weight[kBlocks];
            for (int64_t b = 0; b < kBlocks; ++b) {
                weight[b] = load(weights + b * of_block);
                fetch_ahead(weights + b * of_block);
            }
            for (int64_t i = 0; i < kRows; ++i) {
                const Vec input = splat(inner[i][rank]);
                for (int64_t b = 0; b < kBlocks; ++b) sums[i][b] = fma(input, weight[b], sums[i][b]);
            }
        }
        for (int64_t i = 0; i < kRows && i < count; ++i)
            for (int64_t b = 0; b < kBlocks; ++b) {
                const int64_t output = (block + b) * kLanes;
                T* to = out_ + row[i] * site_.outputs + output;
                store_first(to, load_first(to, site_.outputs - output) + sums[i][b], site_.outputs - output);
            }
    }

    const Site& site_;
    const T* x_;
    const int64_t x_stride_;
    T* out_;
};

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

// See kernels/lora.py. `x` is [rows, inputs], its rows x_stride apart, `out` [rows, outputs].
PENSTOCK_EXPORT(void, lora)
(const void* site, const void* x, void* out, int64_t x_stride, int64_t threads, int32_t dtype) {
#define CALL(T)                                                                                            \
    Step<T>(*static_cast<const Site*>(site), static_cast<const T*>(x), x_stride, static_cast<T*>(out)).run(threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(lora)
