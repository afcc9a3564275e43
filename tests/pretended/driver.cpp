// A pretended CUDA driver, libcuda.so.1: what Triton, inductor and PyTorch want of one.
//
// Modules hold nothing, functions are known by their names, and launches are counted by the
// pretended runtime (runtime.cpp), which must be preloaded.

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

constexpr int MAX_DEVICES = 8;
constexpr int MAX_THREADS = 1024;
constexpr unsigned MAX_GRID_YZ = 65535;

// A function of the pretended runtime.
template <typename Function>
static Function* runtime(const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "pretended CUDA: the driver is loaded without the runtime\n");
        abort();
    }
    return reinterpret_cast<Function*>(found);
}

static int current_device() {
    static auto* get = runtime<int(int*)>("cudaGetDevice");
    int device;
    get(&device);
    return device;
}

static void note_event(const char* name) {
    static auto* event = runtime<void(const char*, long)>("pretended_event");
    event(name, 0);
}

// ------------------------------------------------------------------------- Devices and contexts

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int* version) {
    static auto* get = runtime<int(int*)>("cudaDriverGetVersion");
    get(version);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* count) {
    static auto* get = runtime<int(int*)>("cudaGetDeviceCount");
    get(count);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int size, CUdevice) {
    snprintf(name, size, "NVIDIA H200");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
    static auto* get = runtime<int(size_t*, size_t*)>("cudaMemGetInfo");
    size_t unused;
    get(&unused, bytes);
    return CUDA_SUCCESS;
}

// Attributes have the same numbers in the runtime.
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    static auto* get = runtime<int(int*, int, int)>("cudaDeviceGetAttribute");
    get(value, static_cast<int>(attribute), device);
    return CUDA_SUCCESS;
}

static char contexts[MAX_DEVICES];

static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(contexts + device); }

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = context_of(current_device());
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------- Modules and launches

static std::mutex mutex;

static std::map<CUfunction, std::string>& names() {
    static auto* all = new std::map<CUfunction, std::string>;
    return *all;
}

static CUresult load(CUmodule* module) {
    note_event("load of a module");
    *module = static_cast<CUmodule>(malloc(64));
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule* module, const char*) { return load(module); }

API CUresult cuModuleLoadData(CUmodule* module, const void*) { return load(module); }

API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    return load(module);
}

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    *function = static_cast<CUfunction>(malloc(64));
    names()[*function] = std::string("triton ") + name;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = 32;
    else
        *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS : 0;
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, unsigned x, unsigned y, unsigned z, CUstream stream) {
    static auto* note = runtime<void(const char*, void*)>("pretended_launch");
    const char* name;
    {
        std::lock_guard<std::mutex> lock(mutex);
        name = names()[function].c_str();
    }
    note(name, stream);
    if (x && y && z && y <= MAX_GRID_YZ && z <= MAX_GRID_YZ) return CUDA_SUCCESS;
    fprintf(stderr, "pretended CUDA: grid %u %u %u of %s\n", x, y, z, name);
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuLaunchKernel(
    CUfunction function, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned,
    CUstream stream, void**, void**) {
    return launch(function, x, y, z, stream);
}

API CUresult cuLaunchKernelEx(
    const CUlaunchConfig* config, CUfunction function, void**, void**) {
    return launch(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->hStream);
}

API CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
    *count = 132;
    return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------- The rest

API CUresult cuPointerGetAttribute(
    void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *static_cast<CUdeviceptr*>(value) = pointer;
    else
        *static_cast<int*>(value) = 0;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult, const char** text) {
    *text = "pretended";
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "error of the pretended CUDA driver";
    return CUDA_SUCCESS;
}

API CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }
