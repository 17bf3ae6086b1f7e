// What the kernels of a linear layer share: the packed form of a layer, the tile of work a kernel is given, and the
// walk over these tiles. A kernel is a type with
//
//   Element                  storage type of x, weight and output
//   kRows                    most rows of x in one tile
//   kWholeBlocks             whether tiles are kRows high wherever there are rows, or all of nearly equal height
//   kStepBytes               weight bytes that its inner loop reads between two calls of Prefetch::advance
//   kBytesAhead              by how many bytes weights are prefetched for a single block of rows
//   padded_k(k)              K after zero padding
//   pack_panel(...)          writes 32 rows of the weight as one panel, zero where there is no weight
//   x_bytes(rows, k)         size of `rows` rows of x in the kernel's own order
//   pack_x(...)              writes them
//   Session                  whatever must be set up on a thread before, and undone after, its tiles
//   run(tile)                computes the tile, every output element by one accumulation over K in ascending order
//
// A kernel of quantized weights (`kIsQuantized`) is given their description, and has panel_bytes(quantization, k),
// panels_together(...) and multiply_panels(...) of its own.
//
// Rows are reordered and grouped for speed alone. An output element sees its own row of x, its own row of the weight
// and nothing else, in an order that no size but K decides: that is what makes a token independent of its batch.
#pragma once

#include <unistd.h>

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common.h"
#include "pool.h"
#include "scratch.h"

namespace {

// Columns of output that a panel of packed weights holds.
constexpr int64_t kPanel = 32;

struct Quantization;

// A layer as described in kernels/linear.py: `weight` is packed, `bias` is [out_features] or null.
struct Linear {
    const char* weight;
    const float* bias;
    int64_t in_features;
    int64_t out_features;
    int64_t dtype;
    int64_t is_wide;  // whether the output is float32, as accumulated, instead of the layer's own type
    const Quantization* quantization;  // of the weight, or null
};

// Weights to prefetch while a tile computes, in even portions: a burst would fill the processor's list of pending
// misses, and the tile's own loads would wait behind it.
struct Prefetch {
    const char* at;
    int64_t step;  // bytes

    // Into the second-level cache: what is fetched may be used a whole panel later.
    PENSTOCK_INLINE void advance() {
        for (int64_t byte = 0; byte < step; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        at += step;
    }
};

// One product: `rows` rows of x with one panel of weights.
template <class Element>
struct Tile {
    const char* x;       // in the kernel's order
    const char* weight;  // one packed panel
    const float* bias;   // of this panel's columns, or null
    char* out;           // [rows, columns], rows `out_stride` bytes apart
    int64_t out_stride;
    bool is_wide;
    bool streams;  // whether to store past the caches, which do not hold all outputs until they are read
    int64_t rows;
    int64_t columns;  // at most kPanel
    int64_t k;        // padded
    Prefetch prefetch;
    Prefetch rows_ahead;  // the same of x, for a kernel that takes chunks
    // Where a kernel that takes some inputs at a time has the sums of earlier ones, [rows, kPanel], if it continues them,
    // and leaves its own if there are inputs to come.
    float* sums;
    bool continues, is_unfinished;
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Range {
    int64_t begin, end;
};

// Part `index` of `parts` nearly equal parts of 0..count.
Range part_of(int64_t count, int64_t index, int64_t parts) {
    return {count * index / parts, count * (index + 1) / parts};
}

thread_local Scratch scratch;

// Bytes of x, in the kernel's order, that stay in the second-level cache while the panels of weights pass: half of it.
int64_t rows_bytes() {
    int64_t cache = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return (cache > 0 ? cache : 1 << 20) / 2;
}

// Threads divide either the rows or the panels, and each thread reads all of the other: so they divide the rows if
// there are many compared with the outputs and enough for every thread, and else the panels.
int64_t row_parts(const Linear& layer, int64_t rows, int64_t threads) {
    if (rows * 8 < layer.out_features) return 1;
    int64_t parts = smaller(threads, larger(1, rows / 128));
    while (threads % parts) --parts;
    return parts;
}

template <class Kernel>
constexpr bool kIsQuantized = false;

// Whether the kernel can multiply by a chunk of a panel at a time (`multiply_in_chunks`). It has
//
//   kChunk, kPanelsOfChunk      inputs of a chunk, and panels that take a chunk of the rows in turn
//   kChunkBlocks                blocks of rows for which that pays
//   kStepInputs                 inputs that its inner loop reads between two calls of Prefetch::advance
//   input_bytes(rows, k)        size of `k` inputs of `rows` rows of x in the kernel's order
//   widened(quantization, k, panel, inputs, to)
//                               where the weights of a panel's inputs are as `run_unfinished` takes them: at `to`, if it
//                               writes them
//   run_unfinished(tile, left)  as `run`, up to the tile's sums, in an order of its own; it returns where they belong if it
//                               leaves them in registers, and stores what the call before has left
//   store_left(left)            stores that after the last call
//   store_sums(tile, row, sums) stores a row of sums as the tile's output
template <class Kernel>
constexpr bool kTakesChunks = false;

template <class Kernel>
int64_t panel_bytes(const Quantization* quantization, int64_t k) {
    if constexpr (kIsQuantized<Kernel>)
        return Kernel::panel_bytes(*quantization, k);
    else
        return Kernel::padded_k(k) * kPanel * static_cast<int64_t>(sizeof(typename Kernel::Element));
}

template <class Kernel>
int64_t out_bytes(const Linear& layer) {
    return layer.is_wide ? sizeof(float) : sizeof(typename Kernel::Element);
}

// Rows of x in the kernel's order, in blocks.
template <class Kernel>
struct Blocks {
    int64_t rows, k, count, height, bytes;  // `bytes` of a block
    char* packed;                           // 64-byte aligned memory of `size()` bytes, which the owner sets

    Blocks(int64_t rows, int64_t k) : rows(rows), k(k), count(divide_up(rows, Kernel::kRows)), packed(nullptr) {
        // AMX rows come in whole tiles; elsewhere blocks of equal height waste the least.
        height = Kernel::kWholeBlocks ? Kernel::kRows : divide_up(rows, count);
        bytes = Kernel::x_bytes(height, k);
    }
    int64_t size() const { return round_up(count * bytes, 64); }
    int64_t first(int64_t block) const { return block * height; }
    int64_t height_of(int64_t block) const { return smaller(height, rows - first(block)); }
    // Packs a block from its rows, which are contiguous.
    void pack(int64_t block, const void* x) {
        Kernel::pack_x(static_cast<const typename Kernel::Element*>(x), packed + block * bytes, height_of(block), k);
    }
};

// Most rows that a thread packs at a time.
template <class Kernel>
int64_t most_rows(int64_t k) {
    const int64_t row_bytes = Kernel::x_bytes(Kernel::kRows, k) / Kernel::kRows;
    // Kernels that dequantise or widen a panel do so once for every group of packed rows: their groups are larger, and stay in
    // the third-level cache.
    int64_t rows = rows_bytes() * (kIsQuantized<Kernel> || kTakesChunks<Kernel> ? 8 : 1) / row_bytes;
    if constexpr (kTakesChunks<Kernel>) {
        // A chunk of them and their sums stay in the second-level cache.
        const int64_t sum_bytes = Kernel::kPanelsOfChunk / 2 * kPanel * sizeof(float);
        const int64_t chunk_bytes = Kernel::input_bytes(Kernel::kRows, Kernel::kChunk) / Kernel::kRows;
        rows = smaller(rows, rows_bytes() * 3 / 4 / (chunk_bytes + sum_bytes));
    }
    return larger(1, rows / Kernel::kRows) * Kernel::kRows;
}

// Multiplies the rows by one panel that is not quantized, as `multiply_panels` does. The panel is in the second-level cache
// when its turn comes; a single block of rows, which takes no longer than the memory, has each weight fetched shortly before.
template <class Kernel>
void multiply_dense_panel(const Blocks<Kernel>& x, const char* weight, bool follows,
                          Tile<typename Kernel::Element> tile) {
    const int64_t bytes = panel_bytes<Kernel>(nullptr, x.k);
    const int64_t share = larger(1, Kernel::kStepBytes / x.count), ahead_bytes = x.count == 1 ? Kernel::kBytesAhead : bytes;
    const int64_t block_share = share * (bytes / Kernel::kStepBytes);
    char* out = tile.out;
    tile.weight = weight;
    tile.k = Kernel::padded_k(x.k);
    for (int64_t block = 0; block < x.count; ++block) {
        const bool ahead = (follows || x.count == 1) && block * block_share < bytes;
        tile.x = x.packed + block * x.bytes;
        tile.out = out + x.first(block) * tile.out_stride;
        tile.rows = x.height_of(block);
        tile.prefetch = Prefetch{weight + ahead_bytes + block * block_share, ahead ? share : 0};
        Kernel::run(tile);
    }
}

thread_local Scratch chunk_memory;

// Multiplies the rows by `count` panels, as `multiply_panels` does, a chunk of inputs after another.
// A chunk of a panel is widened once for all rows, and stays in the first-level cache; a chunk of the rows stays in the
// second-level cache for some panels, as do the sums; of fewer panels if it holds all of the rows too. If it does not, the next
// chunk of the rows is prefetched meanwhile. Sums are stored row by row for all the panels at the end: rows of an output are
// often a power of two apart, so those of one panel would share a set of the cache.
template <class Kernel, class TileOf>
void multiply_in_chunks(const Blocks<Kernel>& x, const Quantization* quantization, const char* weight, int64_t count,
                        const TileOf& tile_of) {
    using Element = typename Kernel::Element;
    constexpr int64_t kChunk = Kernel::kChunk, kSumsOfBlock = Kernel::kRows * kPanel, kPanels = Kernel::kPanelsOfChunk;
    constexpr int64_t kStepInputs = Kernel::kStepInputs;
    const int64_t k = Kernel::padded_k(x.k), bytes = panel_bytes<Kernel>(quantization, x.k);
    const int64_t share = larger(1, bytes * kStepInputs / k / x.count), num_sums = kPanels * x.count * kSumsOfBlock;
    float* wide = reinterpret_cast<float*>(chunk_memory.reserve((kChunk * kPanel + num_sums) * sizeof(float)));
    float* sums = wide + kChunk * kPanel;
    const bool is_far = x.size() > rows_bytes();
    for (int64_t panel = 0, some; panel < count; panel += some, weight += some * bytes) {
        some = smaller(is_far ? kPanels : kPanels / 2, count - panel);
        Tile<Element> tiles[kPanels];
        for (int64_t number = 0; number < some; ++number) tiles[number] = tile_of(panel + number);
        float* left = nullptr;
        for (int64_t at = 0; at < divide_up(k, kChunk) * some; ++at) {
            const int64_t first = at / some * kChunk, number = at % some;
            const char* own = weight + number * bytes;
            const char* next = number + 1 < some    ? own + bytes + bytes * first / k
                               : first + kChunk < k ? weight + bytes * (first + kChunk) / k
                                                    : weight + some * bytes;
            Tile<Element> tile = tiles[number];
            tile.k = smaller(kChunk, k - first);
            const int64_t then = first + tile.k < k ? first + tile.k : 0;
            const bool needs_rows = is_far && (then || panel + some < count);
            tile.continues = first > 0;
            tile.is_unfinished = true;
            tile.weight = Kernel::widened(quantization, x.k, own, {first, smaller(x.k, first + tile.k)}, wide);
            tile.sums = sums + number * x.count * kSumsOfBlock;
            for (int64_t block = 0; block < x.count; ++block, tile.sums += kSumsOfBlock) {
                tile.rows = x.height_of(block);
                tile.x = x.packed + block * x.bytes + Kernel::input_bytes(tile.rows, first);
                tile.prefetch = Prefetch{next + block * share * (tile.k / kStepInputs), share};
                if (needs_rows) {
                    const int64_t piece = Kernel::input_bytes(tile.rows, tile.k) / some;
                    const char* rows_then = x.packed + block * x.bytes + Kernel::input_bytes(tile.rows, then);
                    tile.rows_ahead = Prefetch{rows_then + number * piece, piece * kStepInputs / tile.k};
                }
                left = Kernel::run_unfinished(tile, left);
            }
        }
        Kernel::store_left(left);
        for (int64_t block = 0; block < x.count; ++block)
            for (int64_t row = 0; row < x.height_of(block); ++row)
                for (int64_t number = 0; number < some; ++number) {
                    Tile<Element> tile = tiles[number];
                    tile.out += x.first(block) * tile.out_stride;
                    tile.rows = x.height_of(block);
                    tile.x = x.packed + block * x.bytes;
                    tile.weight = weight + number * bytes;
                    tile.k = k;
                    Kernel::store_sums(tile, row, sums + (number * x.count + block) * kSumsOfBlock);
                }
    }
}

// Multiplies the rows by `count` panels that follow one another. tile_of(number) describes the output and the bias of one,
// starting with the first row. If another panel `follows` the last one in memory, it is prefetched meanwhile.
template <class Kernel, class TileOf>
void multiply_panels(const Blocks<Kernel>& x, const Quantization* quantization, const char* weight, int64_t count,
                     bool follows, const TileOf& tile_of) {
    const int64_t bytes = panel_bytes<Kernel>(quantization, x.k);
    if constexpr (kTakesChunks<Kernel>)
        if (x.count >= Kernel::kChunkBlocks) return multiply_in_chunks(x, quantization, weight, count, tile_of);
    for (int64_t panel = 0; panel < count;) {
        if constexpr (kIsQuantized<Kernel>) {
            const int64_t together = smaller(Kernel::panels_together(x, *quantization), count - panel);
            Tile<typename Kernel::Element> tiles[2] = {tile_of(panel), tile_of(panel + together - 1)};
            Kernel::multiply_panels(x, *quantization, weight + panel * bytes, follows || panel + together < count, tiles,
                                    together);
            panel += together;
        } else {
            multiply_dense_panel(x, weight + panel * bytes, follows || panel + 1 < count, tile_of(panel));
            ++panel;
        }
    }
}

// Which rows this thread has packed last: those of a call of `multiply`, numbered by `last_product`, from row `first` on. The
// next part of the same product that the thread takes finds them in its scratch memory.
struct PackedRows {
    int64_t product, first;
    bool operator==(const PackedRows& other) const { return product == other.product && first == other.first; }
};
thread_local PackedRows packed_rows;
std::atomic<int64_t> last_product;

// Multiplies every panel of `panels` by `rows` rows of x from `wanted.first` on, which are packed unless they are already.
template <class Kernel>
void multiply_rows(const Linear& layer, const PackedRows& wanted, const typename Kernel::Element* x, char* out,
                   int64_t out_stride, int64_t rows, Range panels) {
    Blocks<Kernel> blocks(rows, layer.in_features);
    blocks.packed = scratch.reserve(blocks.size());
    x += wanted.first * layer.in_features;
    out += wanted.first * out_stride;
    if (!(packed_rows == wanted))
        for (int64_t block = 0; block < blocks.count; ++block)
            blocks.pack(block, x + blocks.first(block) * layer.in_features);
    packed_rows = wanted;
    const int64_t bytes = panel_bytes<Kernel>(layer.quantization, layer.in_features), out_size = out_bytes<Kernel>(layer);
    multiply_panels(blocks, layer.quantization, layer.weight + panels.begin * bytes, panels.end - panels.begin, false,
                    [&](int64_t number) {
                        const int64_t column = (panels.begin + number) * kPanel;
                        Tile<typename Kernel::Element> tile{};
                        tile.out_stride = out_stride;
                        tile.is_wide = layer.is_wide != 0;
                        tile.streams = rows * out_stride >= rows_bytes() / 2;
                        tile.bias = layer.bias ? layer.bias + column : nullptr;
                        tile.out = out + column * out_size;
                        tile.columns = smaller(kPanel, layer.out_features - column);
                        return tile;
                    });
}

// One part of the product: some of the rows times some of the panels.
template <class Kernel>
void multiply_part(const Linear& layer, int64_t product, const void* x, char* out, int64_t out_stride, int64_t rows,
                   int64_t thread, int64_t threads) {
    using Element = typename Kernel::Element;
    const int64_t parts = row_parts(layer, rows, threads);
    const Range panels = part_of(divide_up(layer.out_features, kPanel), thread % (threads / parts), threads / parts);
    const Range mine = part_of(divide_up(rows, Kernel::kRows), thread / (threads / parts), parts);
    const int64_t most = most_rows<Kernel>(layer.in_features);
    typename Kernel::Session session(rows);
    for (int64_t first = mine.begin * Kernel::kRows; first < smaller(rows, mine.end * Kernel::kRows); first += most) {
        const int64_t count = smaller(most, smaller(rows, mine.end * Kernel::kRows) - first);
        multiply_rows<Kernel>(layer, {product, first}, static_cast<const Element*>(x), out, out_stride, count, panels);
    }
}

// Picoseconds of a thread for a weight from a cache, or from memory if a layer has more of them, and for each row that is
// multiplied by it.
constexpr int64_t kCachedPicoseconds = 40, kMemoryPicoseconds = 100, kMostCached = 1 << 20;
#if defined(__AVX512BF16__)
constexpr int64_t kRowPicoseconds = 5;
#elif defined(__AVX512F__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int64_t kRowPicoseconds = 12;
#else
constexpr int64_t kRowPicoseconds = 25;
#endif

int64_t product_nanoseconds(int64_t weights, int64_t rows) {
    return weights * ((weights > kMostCached ? kMemoryPicoseconds : kCachedPicoseconds) + rows * kRowPicoseconds) / 1000;
}

// Parts of a product per thread, so that a thread that starts late leaves most of its parts to the others: waking it up
// can take longer than the product. Every part reads all rows, so this is for few rows only.
constexpr int64_t kPartsPerThread = 4;
constexpr int64_t kFewRows = 64;

template <class Kernel>
void multiply(const Linear& layer, const void* x, void* out, int64_t out_stride, int64_t rows, int64_t threads) {
    threads = penstock_useful_threads(product_nanoseconds(layer.in_features * layer.out_features, rows), threads);
    const int64_t parts = threads > 1 && rows <= kFewRows ? threads * kPartsPerThread : threads;
    const int64_t product = ++last_product, stride = out_stride * out_bytes<Kernel>(layer);
    run_parts(parts, threads, [&](int64_t part) {
        multiply_part<Kernel>(layer, product, x, static_cast<char*>(out), stride, rows, part, parts);
    });
}

// Calls pack_panel(panel, its first column, its number of columns) for every panel of a layer's weight.
template <class Pack>
void pack_panels(const Linear& layer, int64_t threads, const Pack& pack_panel) {
    run_parts(threads, threads, [&](int64_t part) {
        const Range panels = part_of(divide_up(layer.out_features, kPanel), part, threads);
        for (int64_t panel = panels.begin; panel < panels.end; ++panel)
            pack_panel(panel, panel * kPanel, smaller(kPanel, layer.out_features - panel * kPanel));
    });
}

// Writes the packed form of `weight` [out_features, in_features] where `layer.weight` points.
template <class Kernel>
void pack(const Linear& layer, const void* weight, int64_t threads) {
    using Element = typename Kernel::Element;
    const int64_t bytes = panel_bytes<Kernel>(nullptr, layer.in_features);
    pack_panels(layer, threads, [&](int64_t panel, int64_t first, int64_t columns) {
        Kernel::pack_panel(static_cast<const Element*>(weight) + first * layer.in_features,
                           reinterpret_cast<Element*>(const_cast<char*>(layer.weight) + panel * bytes), columns,
                           layer.in_features);
    });
}

}  // namespace
