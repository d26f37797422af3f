/* A CUDA runtime with one GPU that does nothing.
 *
 * Preload this library into a CUDA build of torch on a machine without a GPU. torch then creates fake `cuda` tensors
 * and dispatches them as on a real GPU. Kernels never run, and device memory is host memory, so real tensors on this
 * device have undefined values. Functions that are not defined here come from the real CUDA runtime.
 *
 * The environment variable CUDA_STUB_CAPABILITY sets the compute capability, times ten: 80 for an A100.
 * CUDA_STUB_MEMORY_BYTES sets the memory of the GPU.
 */

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEFAULT_CAPABILITY 80
#define MEMORY_BYTES (40ull << 30)
#define MULTIPROCESSORS 108
#define SHARED_BYTES_PER_BLOCK 49152
#define MOST_SHARED_BYTES_PER_BLOCK 166912

static size_t memory_bytes(void) {
  const char *text = getenv("CUDA_STUB_MEMORY_BYTES");
  return text ? strtoull(text, NULL, 10) : MEMORY_BYTES;
}

static int capability(void) {
  const char *text = getenv("CUDA_STUB_CAPABILITY");
  return text ? atoi(text) : DEFAULT_CAPABILITY;
}

/* Addresses of device memory. They grow and are never used again, so the order of two segments is known. Pages of the
 * host are used only when a test writes to them.
 */

#define ADDRESS_BYTES (1ull << 44)
#define SEGMENT_ALIGNMENT (2ull << 20)

static char *first_address, *next_address;
static size_t used_bytes;
static size_t bytes_at[ADDRESS_BYTES / SEGMENT_ALIGNMENT]; /* by address */

static int take(size_t nbytes) {
  if (used_bytes + nbytes > memory_bytes())
    return 0;
  used_bytes += nbytes;
  return 1;
}

static void *reserve_addresses(size_t nbytes) {
  if (!first_address)
    first_address = next_address = mmap(NULL, ADDRESS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (next_address == MAP_FAILED)
    return NULL;
  void *address = next_address;
  next_address += (nbytes + SEGMENT_ALIGNMENT - 1) / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
  return address;
}

/* The device */

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  (void)device;
  return cudaSuccess;
}

/* With CUDA 12 the header renames this function to cudaGetDeviceProperties_v2. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  (void)device;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "A GPU that does nothing");
  properties->totalGlobalMem = memory_bytes();
  properties->major = capability() / 10;
  properties->minor = capability() % 10;
  properties->multiProcessorCount = MULTIPROCESSORS;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = SHARED_BYTES_PER_BLOCK;
  properties->sharedMemPerBlockOptin = MOST_SHARED_BYTES_PER_BLOCK;
  properties->sharedMemPerMultiprocessor = MOST_SHARED_BYTES_PER_BLOCK + 1024;
  properties->l2CacheSize = 40 << 20;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  switch (attribute) {
  case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
  case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
  case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
  case cudaDevAttrWarpSize: *value = 32; break;
  case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES_PER_BLOCK; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = MOST_SHARED_BYTES_PER_BLOCK; break;
  default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = memory_bytes();
  *available = *total - used_bytes;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  (void)device, (void)peer;
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

/* torch looks up functions of the driver by their names. All of them succeed. Most of them do nothing. This library has
 * the name of the driver's library, so torch finds cuDevicePrimaryCtxGetState here.
 */
static int driver_function(void) { return 0; }

static int create_memory(unsigned long long *handle, size_t nbytes, const void *properties, unsigned long long flags) {
  (void)properties, (void)flags;
  *handle = nbytes;
  return take(nbytes) ? 0 : 2; /* CUDA_ERROR_OUT_OF_MEMORY */
}

static int release_memory(unsigned long long handle) {
  used_bytes -= handle;
  return 0;
}

static int reserve_address_range(unsigned long long *address, size_t nbytes, size_t alignment, unsigned long long wanted,
                                 unsigned long long flags) {
  (void)alignment, (void)wanted, (void)flags;
  *address = (unsigned long long)reserve_addresses(nbytes);
  return *address ? 0 : 2;
}

static void *driver_function_named(const char *name) {
  if (!strcmp(name, "cuMemCreate"))
    return (void *)create_memory;
  if (!strcmp(name, "cuMemRelease"))
    return (void *)release_memory;
  if (!strcmp(name, "cuMemAddressReserve"))
    return (void *)reserve_address_range;
  return (void *)driver_function;
}

int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *is_active) {
  (void)device;
  *flags = 0;
  *is_active = 1;
  return 0;
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  (void)version, (void)flags;
  *function = driver_function_named(name);
  if (status)
    *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#endif

/* Memory */

cudaError_t cudaMalloc(void **pointer, size_t nbytes) {
  *pointer = take(nbytes) ? reserve_addresses(nbytes) : NULL;
  if (*pointer)
    bytes_at[((char *)*pointer - first_address) / SEGMENT_ALIGNMENT] = nbytes;
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *pointer) {
  if (pointer)
    used_bytes -= bytes_at[((char *)pointer - first_address) / SEGMENT_ALIGNMENT];
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t nbytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  (void)kind, (void)stream;
  memcpy(destination, source, nbytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t nbytes, cudaStream_t stream) {
  (void)stream;
  memset(pointer, value, nbytes);
  return cudaSuccess;
}

/* Streams and events: everything is always finished. */

static int handle;

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
  (void)flags, (void)priority;
  *stream = (cudaStream_t)&handle;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  (void)stream, (void)id, (void)graph, (void)dependencies, (void)edges, (void)count;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#endif

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  (void)stream, (void)event, (void)flags;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  (void)flags;
  *event = (cudaEvent_t)&handle;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)event;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  (void)event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  (void)event, (void)stream;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  (void)event;
  return cudaSuccess;
}

/* Kernels */

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  (void)function, (void)grid, (void)block, (void)arguments, (void)shared_bytes, (void)stream;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  (void)function;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return cudaSuccess;
}
