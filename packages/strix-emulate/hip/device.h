/* SPDX-License-Identifier: BSD-3-Clause */
/* Declarations that the source files of the library share. Apart from calls of HIP's entry points,
   each file uses only files that are listed above it. The exception is graph.c, which also uses
   graph_memory.c. */
#pragma once
#include "errors.h"
#include "protocol.h"
#include <stdbool.h>
#include <time.h>

/* PLACE and FIND search a list that is linked by `next` for the first element `it` for which a
   condition holds. PLACE returns the address of the pointer to that element, or of the pointer at
   the end of the list. FIND returns the element, or NULL. */
#define PLACE(list, condition)                               \
    ({                                                       \
        __typeof__(list) *at_ = &(list), it;                 \
        while ((it = *at_) && !(condition)) at_ = &it->next; \
        at_;                                                 \
    })
#define FIND(list, condition) (*PLACE(list, condition))

/* context.c */
int device_count(void);
bool device_exists(int device);
int device_current(void);

/* views.c: parts of the pool that have another address, too. views_begin is called after the pool
   has been mapped. */
void views_begin(struct pool_header *pool);
const struct pool_view *view_find(const void *address);
bool view_holds(const void *address, size_t size);
bool view_add(void *address, size_t size, uint64_t offset, unsigned access);
void view_set(void *address, size_t size, unsigned access);
void view_remove(void *address, size_t size);

/* pool.c: the pool, which is the device memory. pool_map creates the pool if it does not exist. */
hipError_t pool_map(void);
int pool_file(void);
size_t pool_size(void);
size_t pool_used(void);
size_t pool_peak(void);
hipError_t pool_allocate(void **address, size_t size, enum pool_kind kind);
/* Frees the allocation that starts at the address, if its kind is in the bit mask `kinds`. */
hipError_t pool_free(void *address, unsigned kinds);
/* Frees the memory that the program allocated on a device, except for physical memory, pinned
   memory of the host, memory of other processes, and memory of graphs. */
void pool_clear(int device);
/* Memory of graphs. It is reserved with the kind KIND_GRAPH. pool_occupy allocates reserved memory,
   and pool_free makes it reserved memory again. pool_give_up ends the reservation when no graph
   uses the memory any more. Memory that is allocated at that time becomes ordinary device
   memory. */
hipError_t pool_occupy(void *address);
void pool_give_up(void *address);
/* pool_count returns the bytes of the allocations that have all these kinds. pool_count_of returns
   the bytes of the allocations of a memory pool of HIP. */
size_t pool_count(unsigned kinds);
size_t pool_count_of(unsigned memory_pool);
void pool_assign(void *address, unsigned memory_pool);
void pool_set_flags(void *address, unsigned flags);
/* pool_import maps an allocation of another process, whose pool is the file `path`. pool_drop
   unmaps it. */
hipError_t pool_import(void **address, const char *path, uint64_t offset, size_t size);
void pool_drop(void *address);
const struct pool_entry *pool_find(const void *address);
/* Returns whether the bytes lie in one allocation or in adjacent views, or are memory of the host
   that is not pinned. */
bool pool_holds(const void *address, size_t size);
bool pool_is_device(const void *address);
/* Returns the start and the size of the allocation or of the view that contains an address. */
void pool_range(const void *address, void **start, size_t *size);

/* host.c: the flags with which memory of the host was allocated or pinned. 0 for other memory. */
unsigned host_flags(const void *address);

/* The GPUs that can be emulated. The first is the default. build.py generates this table from
   strix_emulate/code/target.py, which documents the fields. The last entry has the name NULL. */
struct target {
    const char *name, *product;
    int major, minor, stepping, processors, registers, simds, waves, width, threads, lds,
        lds_of_processor, stack, l2, clock, memory_clock, bus, integrated;
};
extern const struct target targets[];

/* properties.c */
const struct target *device_target(void);
/* Returns the bytes of a lane's stack, for kernels that need an unknown amount. */
size_t device_stack(void);
/* Returns the bytes of the heap for malloc in kernels. */
size_t device_heap(void);

/* link.c: the connection to the emulator's process. link_request sends a request that consists of
   `count` parts. The caller frees *reply. If the request fails, the message is printed to standard
   error. */
struct part {
    const void *data;
    size_t size;
};
hipError_t link_request(uint32_t operation, const struct part *parts, int count, void **reply,
                        size_t *reply_size);

/* stream.c */
struct capture {
    hipGraph_t graph;
    hipStream_t origin;
    unsigned long long number;
    bool invalid;
};
struct tail {
    hipGraphNode_t *nodes;
    size_t count;
};
/* capture: the capture of the stream, or NULL. tail: during a capture, the nodes on which the
   stream's next node depends. */
struct ihipStream_t {
    unsigned flags;
    int priority;
    unsigned long long number;
    hipStream_t next;
    struct capture *capture;
    struct tail tail;
    int device;
};
struct ihipEvent_t {
    unsigned flags;
    bool recorded;
    struct timespec time;
    hipEvent_t next;
    struct capture *capture;
    struct tail tail;
};
hipStream_t stream_first(void);
void stream_drop(hipStream_t stream);
bool stream_is_valid(hipStream_t stream);
bool event_is_valid(hipEvent_t event);
hipError_t event_record(hipEvent_t event);
void event_forget(struct capture *capture);
struct capture *capture_of(hipStream_t stream);
/* Invalidates a capture, because a call is not permitted during a capture. Returns the error of the
   call, or hipSuccess if `capture` is NULL. */
hipError_t capture_spoil(struct capture *capture);

/* The operations that a stream or a node of a graph can execute. */
enum work_kind {
    WORK_NOTHING,
    WORK_KERNEL,
    WORK_COPY,
    WORK_FILL,
    WORK_CALL,
    WORK_RECORD,
    WORK_GRAPH,
    WORK_ALLOCATE,
    WORK_FREE,
};
struct work {
    enum work_kind kind;
    union {
        struct {
            hipFunction_t function;
            struct launch_request request;
            char *arguments;
        } kernel;
        struct {
            void *to;
            size_t to_pitch;
            const void *from;
            size_t from_pitch, width, height;
            hipMemcpyKind kind;
            size_t to_slice, from_slice, depth;
        } copy;
        /* Each row has `count` elements, which have 1, 2 or 4 bytes. */
        struct {
            void *to;
            size_t pitch;
            unsigned value;
            size_t element, count, height, slice, depth;
        } fill;
        struct {
            void *address;
            size_t size;
        } memory;
        struct {
            hipHostFn_t function;
            void *data;
        } call;
        hipEvent_t event;
        hipGraph_t graph;
    };
};
/* module.c */
struct ihipModuleSymbol_t {
    hipModule_t module;
    struct function_reply facts;
    struct function_argument *arguments;
    char *name;
    hipFunction_t next;
};
/* owner: an address in the library or program that contains the image */
hipError_t module_load(hipModule_t *module, const void *image, size_t size, const void *owner);
size_t module_image_size(const void *image);
hipError_t module_unload(hipModule_t module);
hipError_t module_function(hipFunction_t *function, hipModule_t module, const char *name);
hipError_t module_symbol(void **address, size_t *size, hipModule_t module, const char *name);
/* Describes a launch as work, with the arguments packed as the kernel expects them. */
hipError_t module_work(struct work *work, hipFunction_t function, dim3 grid, dim3 block, size_t lds,
                       void **values, void **extra, bool cooperative);
const char *module_name(hipFunction_t function);
bool module_knows(hipFunction_t function);
/* caller: an address in the library or program that loads the module */
hipError_t module_open(hipModule_t *module, const void *image, const void *caller);
hipError_t module_read(hipModule_t *module, const char *path, const void *caller);
/* Returns the names of the module's kernels, each followed by a zero byte. The caller frees
   them. */
hipError_t module_kernels(char **names, size_t *size, hipModule_t module);

/* registered.c: the kernel or variable for the address of a symbol in the host program. */
hipError_t registered_function(hipFunction_t *function, const void *host);
hipError_t registered_variable(void **address, size_t *size, const void *host);

/* graph.c */
struct hipGraphNode {
    struct work work;
    hipGraphNode_t *dependencies;
    size_t dependency_count;
    void **values;
};
struct hipUserObject {
    void *data;
    hipHostFn_t destroy;
    unsigned count;
};
struct reference {
    hipUserObject_t object;
    unsigned count;
};
struct ihipGraph {
    hipGraphNode_t *nodes;
    size_t count;
    struct reference *references;
    size_t reference_count;
    hipGraph_t next;
};
hipGraph_t graph_create(void);
hipGraph_t graph_clone(hipGraph_t graph);
void graph_destroy(hipGraph_t graph);
bool graph_is_valid(hipGraph_t graph);
/* Returns the graph that contains a node, or NULL if no graph does. */
hipGraph_t graph_of(hipGraphNode_t node);
bool graph_depends(hipGraphNode_t node, hipGraphNode_t on);
bool graph_depend(hipGraphNode_t node, hipGraphNode_t on);
/* Returns the index of a node in a graph, or the number of nodes if the graph does not contain
   it. */
size_t graph_index(hipGraph_t graph, hipGraphNode_t node);
/* Moves each node behind the nodes on which it depends, and otherwise keeps the order of the nodes.
   Returns false if the dependencies have a cycle. */
bool graph_sort(hipGraph_t graph);
hipError_t graph_add(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *dependencies,
                     size_t count, struct work *work);
void graph_drop_node(hipGraphNode_t node);
bool work_copy(struct work *to, const struct work *from);
/* graph_memory.c: memory of graphs, with the number of nodes that refer to it */
hipError_t region_make(void **address, size_t size);
hipError_t region_occupy(void *address);
bool region_use(void *address);
void region_drop(void *address);
/* graph.c */
void work_free(struct work *work);
void graph_release(hipUserObject_t object, unsigned count);
bool graph_retain(hipGraph_t graph, hipUserObject_t object, unsigned count);

/* capture.c */
hipError_t capture_add(struct capture *capture, hipStream_t stream, struct work *work);
hipError_t capture_record(hipEvent_t event, hipStream_t stream);

/* work.c */
/* Does the work, or adds it as a node if the stream is captured. The function takes over the memory
   to which the work points, and frees it. */
hipError_t work_submit(hipStream_t stream, struct work *work);
hipError_t work_do(const struct work *work);

/* boxes.c */
hipError_t box_work(struct work *work, const hipMemcpy3DParms *box);

/* graph_build.c */
hipError_t graph_set_kernel(hipGraphNode_t node, const hipKernelNodeParams *params);

/* launch.c. The first three numbers are the size of the grid in threads, the next three are the
   size of a workgroup. */
hipError_t hipExtModuleLaunchKernel(hipFunction_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                                    uint32_t, size_t, hipStream_t, void **, void **, hipEvent_t,
                                    hipEvent_t, uint32_t);
