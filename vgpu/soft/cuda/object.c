/*
 * object.c - user objects: a program's own things that live as long as graphs
 * that use them. Their destructors may make no calls, as host functions.
 */
#include <stdlib.h>

#include "graph.h"

struct CUuserObject_st {
  CUhostFn destroy;
  void *pointer;
  uint64_t references;
  CUuserObject next; /* of those that are due */
};

struct held_object {
  CUuserObject object;
  uint64_t count;
  struct held_object *next;
};

static CUuserObject due;

static void let_go(CUuserObject object, uint64_t count) {
  object->references -= count < object->references ? count : object->references;
  if (object->references) return;
  handle_remove(object);
  object->next = due;
  due = object;
}

void objects_finish(void) {
  while (due) {
    CUuserObject gone = due;
    due = gone->next;
    driver_pause();
    driver_in_host_function = true;
    gone->destroy(gone->pointer);
    driver_in_host_function = false;
    driver_resume();
    free(gone);
  }
}

CUresult objects_copy(struct held_object *from, struct held_object **to) {
  for (struct held_object *h = from; h; h = h->next) {
    struct held_object *fresh = malloc(sizeof *fresh);
    if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
    *fresh = (struct held_object){h->object, 1, *to};
    h->object->references++;
    *to = fresh;
  }
  return CUDA_SUCCESS;
}

void objects_drop(struct held_object **all) {
  while (*all) {
    struct held_object *gone = *all;
    *all = gone->next;
    let_go(gone->object, gone->count);
    free(gone);
  }
}

EXPORT CUresult cuUserObjectCreate(CUuserObject *out, void *pointer, CUhostFn destroy, unsigned int references, unsigned int flags) {
  ENTER();
  if (!out || !destroy || !references || references > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUuserObject fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_OBJECT)) {
    free(fresh);
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  }
  *fresh = (struct CUuserObject_st){.destroy = destroy, .pointer = pointer, .references = references};
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
  ENTER();
  if (!handle_is(object, HANDLE_OBJECT) || !count || count > INT32_MAX) LEAVE(CUDA_ERROR_INVALID_VALUE);
  object->references += count;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
  ENTER();
  if (!handle_is(object, HANDLE_OBJECT) || !count || count > object->references) LEAVE(CUDA_ERROR_INVALID_VALUE);
  let_go(object, count);
  objects_finish();
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result != CUDA_SUCCESS || !handle_is(object, HANDLE_OBJECT) || !count || count > INT32_MAX || flags > CU_GRAPH_USER_OBJECT_MOVE)
    LEAVE(CUDA_ERROR_INVALID_VALUE);
  struct held_object *h = graph->objects;
  while (h && h->object != object) h = h->next;
  if (!h) {
    h = calloc(1, sizeof *h);
    if (!h) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    *h = (struct held_object){object, 0, graph->objects};
    graph->objects = h;
  }
  h->count += count;
  if (flags != CU_GRAPH_USER_OBJECT_MOVE) object->references += count;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result != CUDA_SUCCESS || !handle_is(object, HANDLE_OBJECT) || !count) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (struct held_object **link = &graph->objects; *link; link = &(*link)->next) {
    struct held_object *h = *link;
    if (h->object != object) continue;
    if (count > h->count) LEAVE(CUDA_ERROR_INVALID_VALUE);
    h->count -= count;
    if (!h->count) {
      *link = h->next;
      free(h);
    }
    let_go(object, count);
    objects_finish();
    LEAVE(CUDA_SUCCESS);
  }
  LEAVE(CUDA_ERROR_INVALID_VALUE);
}
