// A pretended CUDA runtime and cuBLAS, to be preloaded before PyTorch.
//
// PyTorch's real host code runs on it: dispatch, autograd, the caching allocators, streams, events,
// graph capture and code from inductor. No kernel runs, so every value on the device is meaningless:
// new memory is zero, small copies are done, everything else is left as it was. All work is finished
// at once, so events and streams never make anything wait.
//
// Counted are launches by device and kernel, copies by kind, calls that allocate, wait or capture,
// and graph launches with the kernels in them. A listener, if there is one, is called for every call
// that a steady step must not make, and for copies between host and device.
//
// What is defined here has more to do than to return success. build.py writes all other functions
// that PyTorch's libraries want.

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#define API extern "C" __attribute__((visibility("default")))

// An H200, compute capability 9.0.
constexpr int PROCESSORS = 132;
constexpr int SHARED_MEMORY = 48 << 10;
constexpr int SHARED_MEMORY_OPTIN = 227 << 10;
constexpr int SHARED_MEMORY_PROCESSOR = 228 << 10;
constexpr int REGISTERS = 1 << 16;
constexpr int L2_BYTES = 60 << 20;
constexpr size_t MEMORY_BYTES = 141ull << 30;
// Memory that a context takes before the first allocation.
constexpr size_t CONTEXT_BYTES = 600ull << 20;
constexpr int MAX_DEVICES = 8;
constexpr int MAX_THREADS = 1024;
constexpr unsigned MAX_GRID_YZ = 65535;
constexpr int VERSION = 13020;
// Larger copies are counted and not done: pages that nobody writes take no memory.
constexpr size_t COPIED_BYTES = 4 << 20;
constexpr size_t PAGE = 4096;

// ------------------------------------------------------------------------- Counters

using Listener = void (*)(const char* name, long amount);

struct Kernel {
    std::string name;
    long launches = 0;
};

// Nothing here is ever destroyed: PyTorch's libraries call until the process is gone.
struct State {
    std::mutex mutex;
    std::unordered_map<std::string_view, long> counts;
    long launches[MAX_DEVICES] = {};
    long mallocs[MAX_DEVICES] = {};
    std::unordered_map<const void*, Kernel> kernels;       // of PyTorch, by their host function
    std::unordered_map<std::string, long> other_kernels;  // of Triton and of cuBLAS, by name
    Listener listener = nullptr;
    size_t used = 0;
    // The capture that is going on; 0 is none.
    unsigned long long capture = 0;
    unsigned long long captures = 0;
    long captured = 0;
    std::set<void*> capturing_streams;
};

static State& state() {
    static State* one = new State;
    return *one;
}

static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

using Lock = std::lock_guard<std::mutex>;

static cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

// `name` must be a literal, or live as long.
API void pretended_count(const char* name) {
    Lock lock(state().mutex);
    state().counts[name]++;
}

// Count a call and tell the listener, who may take the lock.
API void pretended_event(const char* name, long amount) {
    pretended_count(name);
    Listener listener = state().listener;
    if (listener) listener(name, amount);
}

API void pretended_listen(Listener listener) { state().listener = listener; }

API void pretended_reset() {
    Lock lock(state().mutex);
    state().counts.clear();
    state().other_kernels.clear();
    for (auto& [function, kernel] : state().kernels) kernel.launches = 0;
    memset(state().launches, 0, sizeof state().launches);
    memset(state().mallocs, 0, sizeof state().mallocs);
}

// Return lines of a name, a tab and a number: of kernels, or of all else. The caller frees them.
API char* pretended_read(int kernels) {
    Lock lock(state().mutex);
    std::string text;
    auto add = [&text](std::string_view name, long number) {
        if (number) text.append(name).append("\t").append(std::to_string(number)).append("\n");
    };
    if (kernels) {
        for (auto& [name, launches] : state().other_kernels) add(name, launches);
        for (auto& [function, kernel] : state().kernels) add(kernel.name, kernel.launches);
    } else {
        for (auto& [name, number] : state().counts) add(name, number);
        for (int device = 0; device < MAX_DEVICES; device++) {
            add("launch on device " + std::to_string(device), state().launches[device]);
            add("cudaMalloc on device " + std::to_string(device), state().mallocs[device]);
        }
    }
    return strdup(text.c_str());
}

// ------------------------------------------------------------------------- Devices

static int device_count() {
    const char* text = getenv("PRETENDED_DEVICES");
    return text ? atoi(text) : 1;
}

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
    *version = VERSION;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = VERSION;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H200");
    p->uuid.bytes[0] = device + 1;
    p->pciBusID = device + 1;
    p->major = 9;
    p->minor = 0;
    p->totalGlobalMem = MEMORY_BYTES;
    p->multiProcessorCount = PROCESSORS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = MAX_THREADS;
    p->maxThreadsDim[1] = MAX_THREADS;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = MAX_GRID_YZ;
    p->maxGridSize[2] = MAX_GRID_YZ;
    p->regsPerBlock = REGISTERS;
    p->regsPerMultiprocessor = REGISTERS;
    p->sharedMemPerBlock = SHARED_MEMORY;
    p->sharedMemPerBlockOptin = SHARED_MEMORY_OPTIN;
    p->sharedMemPerMultiprocessor = SHARED_MEMORY_PROCESSOR;
    p->reservedSharedMemPerBlock = 1024;
    p->totalConstMem = 64 << 10;
    p->l2CacheSize = L2_BYTES;
    p->memoryBusWidth = 6144;
    p->memPitch = 2147483647;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->asyncEngineCount = 3;
    p->canMapHostMemory = 1;
    p->clusterLaunch = 1;
    p->computePreemptionSupported = 1;
    p->concurrentKernels = 1;
    p->concurrentManagedAccess = 1;
    p->cooperativeLaunch = 1;
    p->ECCEnabled = 1;
    p->globalL1CacheSupported = 1;
    p->localL1CacheSupported = 1;
    p->managedMemory = 1;
    p->memoryPoolsSupported = 1;
    p->streamPrioritiesSupported = 1;
    p->unifiedAddressing = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> values = {
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrGlobalMemoryBusWidth, 6144},
        {cudaDevAttrL2CacheSize, L2_BYTES},
        {cudaDevAttrMaxBlockDimX, MAX_THREADS},
        {cudaDevAttrMaxBlockDimY, MAX_THREADS},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, static_cast<int>(MAX_GRID_YZ)},
        {cudaDevAttrMaxGridDimZ, static_cast<int>(MAX_GRID_YZ)},
        {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
        {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
        {cudaDevAttrMaxSharedMemoryPerBlock, SHARED_MEMORY},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_MEMORY_OPTIN},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, SHARED_MEMORY_PROCESSOR},
        {cudaDevAttrMaxThreadsPerBlock, MAX_THREADS},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMemoryClockRate, 3201000},
        {cudaDevAttrMemoryPoolsSupported, 1},
        {cudaDevAttrMultiProcessorCount, PROCESSORS},
        {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
        {cudaDevAttrStreamPrioritiesSupported, 1},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrWarpSize, 32},
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    snprintf(text, size, "0000:0%d:00.0", device + 1);
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorName(cudaError_t) { return "pretended"; }

API const char* cudaGetErrorString(cudaError_t error) {
    static thread_local char text[64];
    snprintf(text, sizeof text, "error %d of the pretended CUDA runtime", error);
    return text;
}

// ------------------------------------------------------------------------- Memory

struct Range {
    size_t bytes;
    cudaMemoryType type;
    int device;
};

// By the first byte; under the lock of the state.
static std::map<const char*, Range>& ranges() {
    static auto* all = new std::map<const char*, Range>;
    return *all;
}

static cudaError_t allocate(void** pointer, size_t bytes, cudaMemoryType type) {
    // A page behind, for kernels of the host that read past the end.
    size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    Lock lock(state().mutex);
    bool on_device = type == cudaMemoryTypeDevice;
    if (on_device && state().used + mapped + CONTEXT_BYTES > MEMORY_BYTES)
        return fail(cudaErrorMemoryAllocation);
    // Takes no memory until it is written, and only copies and memset write.
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* found = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    if (on_device) {
        state().used += mapped;
        state().mallocs[current_device]++;
    }
    ranges()[static_cast<char*>(found)] = {mapped, type, current_device};
    *pointer = found;
    return cudaSuccess;
}

static cudaError_t release(void* pointer) {
    Lock lock(state().mutex);
    auto found = ranges().find(static_cast<char*>(pointer));
    if (found == ranges().end()) return cudaSuccess;
    if (found->second.type == cudaMemoryTypeDevice) state().used -= found->second.bytes;
    munmap(pointer, found->second.bytes);
    ranges().erase(found);
    return cudaSuccess;
}

// The range that holds an address, or null.
static const Range* find_range(const void* pointer) {
    auto after = ranges().upper_bound(static_cast<const char*>(pointer));
    if (after == ranges().begin()) return nullptr;
    auto& [first, range] = *std::prev(after);
    return static_cast<const char*>(pointer) < first + range.bytes ? &range : nullptr;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    pretended_event("cudaMalloc", bytes);
    return allocate(pointer, bytes, cudaMemoryTypeDevice);
}

API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
    return allocate(pointer, bytes, cudaMemoryTypeDevice);
}

API cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
    return allocate(pointer, bytes, cudaMemoryTypeManaged);
}

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    pretended_event("cudaHostAlloc", bytes);
    return allocate(pointer, bytes, cudaMemoryTypeHost);
}

API cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return cudaHostAlloc(pointer, bytes, 0);
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    pretended_event("cudaHostRegister", bytes);
    Lock lock(state().mutex);
    ranges()[static_cast<char*>(pointer)] = {bytes, cudaMemoryTypeHost, 0};
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
    Lock lock(state().mutex);
    ranges().erase(static_cast<char*>(pointer));
    return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
    // PyTorch calls it with null to make a context.
    if (pointer) pretended_event("cudaFree", 0);
    return release(pointer);
}

API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }

API cudaError_t cudaFreeHost(void* pointer) {
    pretended_event("cudaFreeHost", 0);
    return release(pointer);
}

API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
    Lock lock(state().mutex);
    *total = MEMORY_BYTES;
    *unused = MEMORY_BYTES - CONTEXT_BYTES - state().used;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    memset(attributes, 0, sizeof *attributes);
    Lock lock(state().mutex);
    const Range* range = find_range(pointer);
    if (!range) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        return cudaSuccess;
    }
    attributes->type = range->type;
    attributes->device = range->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
    static void* zeros = calloc(1, 1 << 16);
    *pointer = zeros;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    static char one;
    *pool = reinterpret_cast<cudaMemPool_t>(&one);
    return cudaSuccess;
}

// ------------------------------------------------------------------------- Streams, events, graphs

// Only events are freed; other handles are few.
struct Event {
    unsigned long long capture;
};

struct Graph {
    long kernels;
};

template <typename Handle>
static Handle make_handle() {
    return reinterpret_cast<Handle>(calloc(1, 64));
}

// Under the lock.
static bool is_capturing(void* stream) {
    return state().capture && state().capturing_streams.count(stream);
}

// A kernel, a copy or a memset was put on a stream; call it under the lock.
static void note_captured(void* stream) {
    if (!state().capture) return;
    if (is_capturing(stream))
        state().captured++;
    else
        state().counts["work beside a capture"]++;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    pretended_count("cudaStreamCreate");
    *stream = make_handle<cudaStream_t>();
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

// During a capture the real ones fail too.
static cudaError_t wait(const char* name, bool captured) {
    pretended_event(name, 0);
    return captured ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    bool captured;
    {
        Lock lock(state().mutex);
        captured = is_capturing(stream);
    }
    return wait("cudaStreamSynchronize", captured);
}

API cudaError_t cudaDeviceSynchronize() {
    return wait("cudaDeviceSynchronize", state().capture != 0);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize", false); }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = make_handle<cudaEvent_t>();
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    pretended_count("cudaEventRecord");
    Lock lock(state().mutex);
    reinterpret_cast<Event*>(event)->capture = is_capturing(stream) ? state().capture : 0;
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1;
    return cudaSuccess;
}

// A stream that waits for an event of a capture takes part in the capture.
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    pretended_count("cudaStreamWaitEvent");
    Lock lock(state().mutex);
    bool captured = event && reinterpret_cast<Event*>(event)->capture;
    if (state().capture && captured) state().capturing_streams.insert(stream);
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    Lock lock(state().mutex);
    *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* capture,
    cudaGraph_t* graph,
    const cudaGraphNode_t** nodes,
    const cudaGraphEdgeData** edges,
    size_t* count) {
    static cudaGraphNode_t none[1];
    static cudaGraph_t unfinished = make_handle<cudaGraph_t>();
    cudaStreamIsCapturing(stream, status);
    if (capture) *capture = state().capture;
    if (graph) *graph = unfinished;
    if (nodes) *nodes = none;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    pretended_event("cudaStreamBeginCapture", 0);
    Lock lock(state().mutex);
    state().capture = ++state().captures;
    state().captured = 0;
    state().capturing_streams = {stream};
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    Lock lock(state().mutex);
    *graph = make_handle<cudaGraph_t>();
    reinterpret_cast<Graph*>(*graph)->kernels = state().captured;
    state().capture = 0;
    state().capturing_streams.clear();
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(
    cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    pretended_event("cudaGraphInstantiate", 0);
    *executable = make_handle<cudaGraphExec_t>();
    *reinterpret_cast<Graph*>(*executable) = *reinterpret_cast<Graph*>(graph);
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    Lock lock(state().mutex);
    state().counts["graph launch"]++;
    state().counts["kernels in graphs"] += reinterpret_cast<Graph*>(executable)->kernels;
    return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
    // A graph without nodes makes PyTorch warn.
    *count = 1;
    return cudaSuccess;
}

API cudaError_t cudaUserObjectCreate(
    cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
    *object = make_handle<cudaUserObject_t>();
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}

// ------------------------------------------------------------------------- Launches

struct Configuration {
    dim3 grid;
    dim3 block;
    size_t shared;
    void* stream;
};

// Of the <<<>>> expressions that are being evaluated.
static thread_local Configuration configurations[16];
static thread_local int depth = 0;

API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    configurations[depth++] = {grid, block, shared, stream};
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const Configuration& top = configurations[--depth];
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<void**>(stream) = top.stream;
    return cudaSuccess;
}

// Under the lock.
static void note_launch(void* stream) {
    state().counts["launch"]++;
    if (stream) state().counts["launch on a side stream"]++;
    state().launches[current_device]++;
    note_captured(stream);
}

// A kernel that is known by name: of Triton, by way of the driver, or of cuBLAS.
API void pretended_launch(const char* name, void* stream) {
    Lock lock(state().mutex);
    note_launch(stream);
    state().other_kernels[name]++;
}

static cudaError_t launch(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
    Lock lock(state().mutex);
    note_launch(stream);
    Kernel& kernel = state().kernels[function];
    kernel.launches++;
    bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    size_t threads = size_t(block.x) * block.y * block.z;
    if (!empty && grid.y <= MAX_GRID_YZ && grid.z <= MAX_GRID_YZ && threads <= MAX_THREADS)
        return cudaSuccess;
    fprintf(stderr, "pretended CUDA: grid %u %u %u, block %u %u %u of %s\n", grid.x, grid.y, grid.z,
            block.x, block.y, block.z, kernel.name.c_str());
    return fail(cudaErrorInvalidConfiguration);
}

API cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(function, grid, block, stream);
}

API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(kernel, grid, block, stream);
}

API cudaError_t __cudaLaunchKernel_ptsz(
    cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(kernel, grid, block, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
    return launch(function, grid, block, stream);
}

API cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t* config, const void* function, void**) {
    return launch(function, config->gridDim, config->blockDim, config->stream);
}

// The host function stands for the kernel wherever a handle is wanted.
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

API cudaError_t cudaGetFuncBySymbol(cudaFunction_t* found, const void* function) {
    *found = static_cast<cudaFunction_t>(const_cast<void*>(function));
    return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// PyTorch's libraries register all their kernels when they are loaded.
API void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
    Lock lock(state().mutex);
    state().kernels[function].name = name;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = SHARED_MEMORY_OPTIN;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks, function, threads, shared, 0);
}

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name,
    void** function,
    unsigned,
    unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : nullptr;
    auto status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (result) *result = status;
    return cudaSuccess;
}

// ------------------------------------------------------------------------- Copies

static cudaMemoryType memory_type(const void* pointer) {
    Lock lock(state().mutex);
    const Range* range = find_range(pointer);
    return range ? range->type : cudaMemoryTypeUnregistered;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    cudaMemoryType target = memory_type(to);
    cudaMemoryType source = memory_type(from);
    bool into = target == cudaMemoryTypeDevice;
    bool out_of = source == cudaMemoryTypeDevice;
    bool pinned = (into ? source : target) == cudaMemoryTypeHost;
    if (into && out_of)
        pretended_count("copy on the device");
    else if (into)
        pretended_event(pinned ? "copy from pinned memory" : "copy from pageable memory", bytes);
    else if (out_of)
        pretended_event(pinned ? "copy to pinned memory" : "copy to pageable memory", bytes);
    else
        pretended_count("copy on the host");
    {
        Lock lock(state().mutex);
        note_captured(stream);
    }
    if (bytes <= COPIED_BYTES) memmove(to, from, bytes);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

API cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    pretended_event("cudaMemcpy", bytes);
    return copy(to, from, bytes, nullptr);
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    {
        Lock lock(state().mutex);
        state().counts["memset"]++;
        note_captured(stream);
    }
    if (bytes <= COPIED_BYTES) memset(to, value, bytes);
    return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ------------------------------------------------------------------------- cuBLAS

struct Handle {
    void* stream;
};

// Every product that build.py writes ends here; the first argument of all of them is the handle.
API void pretended_product(const char* name, void* handle) {
    pretended_launch(name, static_cast<Handle*>(handle)->stream);
}

API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
    *handle = make_handle<cublasHandle_t>();
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    reinterpret_cast<Handle*>(handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

static const char* type_name(cudaDataType type) {
    if (type == CUDA_R_32F) return "float32";
    if (type == CUDA_R_16BF) return "bfloat16";
    return type == CUDA_R_16F ? "float16" : "another type";
}

API cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
    const void*, cudaDataType type, int, const void*, cudaDataType, int, const void*, void*,
    cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
    pretended_product((std::string("cublasGemmEx ") + type_name(type)).c_str(), handle);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
    const void*, cudaDataType type, int, long long, const void*, cudaDataType, int, long long,
    const void*, void*, cudaDataType, int, long long, int, cublasComputeType_t, cublasGemmAlgo_t) {
    std::string name = std::string("cublasGemmStridedBatchedEx ") + type_name(type);
    pretended_product(name.c_str(), handle);
    return CUBLAS_STATUS_SUCCESS;
}

API size_t cublasLtGetVersion() { return 130400; }

API size_t cublasLtGetCudartVersion() { return VERSION; }

API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = make_handle<cublasLtHandle_t>();
    return CUBLAS_STATUS_SUCCESS;
}

// PyTorch frees these descriptors itself.
API cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType_t) {
    *description = static_cast<cublasLtMatmulDesc_t>(calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    free(description);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t, uint64_t, int64_t) {
    *layout = static_cast<cublasLtMatrixLayout_t>(calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = static_cast<cublasLtMatmulPreference_t>(calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t* result, int* count) {
    memset(result, 0, sizeof *result);
    result->state = CUBLAS_STATUS_SUCCESS;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
    const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*,
    cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    pretended_launch("cublasLtMatmul", stream);
    return CUBLAS_STATUS_SUCCESS;
}
