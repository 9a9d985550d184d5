/* graph.c - graphs, nodes and edges. */
#include "graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next_graph_id = 1, next_node_id = 1;

CUresult graph_checked(CUgraph graph) { return handle_is(graph, HANDLE_GRAPH) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult node_checked(CUgraphNode node, CUgraphNodeType type) {
  if (!handle_is(node, HANDLE_NODE)) return CUDA_ERROR_INVALID_VALUE;
  return type < 0 || node->op.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- lists of nodes ------------------------------------------------------ */

static bool list_add(node_list *list, CUgraphNode node) {
  if (list->count == list->room) {
    size_t room = list->room ? list->room * 2 : 4;
    CUgraphNode *grown = realloc(list->list, room * sizeof *grown);
    if (!grown) return false;
    list->list = grown;
    list->room = room;
  }
  list->list[list->count++] = node;
  return true;
}

static bool list_has(const node_list *list, CUgraphNode node) {
  for (size_t i = 0; i < list->count; i++)
    if (list->list[i] == node) return true;
  return false;
}

static void list_remove(node_list *list, CUgraphNode node) {
  for (size_t i = list->count; i-- > 0;) { /* mostly one of the last */
    if (list->list[i] != node) continue;
    memmove(&list->list[i], &list->list[i + 1], (list->count - i - 1) * sizeof *list->list);
    list->count--;
    return;
  }
}

/* ---- graphs and nodes ---------------------------------------------------- */

CUgraph graph_new(void) {
  CUgraph fresh = calloc(1, sizeof *fresh);
  if (!fresh || !handle_add(fresh, HANDLE_GRAPH)) {
    free(fresh);
    return NULL;
  }
  fresh->id = next_graph_id++;
  return fresh;
}

static void node_free(CUgraphNode node) {
  for (size_t i = 0; i < node->needs.count; i++) list_remove(&node->needs.list[i]->needed_by, node);
  for (size_t i = 0; i < node->needed_by.count; i++) list_remove(&node->needed_by.list[i]->needs, node);
  CUgraph in = node->in;
  if (node->previous) node->previous->next = node->next;
  else in->first = node->next;
  if (node->next) node->next->previous = node->previous;
  else in->last = node->previous;
  in->count--;
  if (node->op.type == CU_GRAPH_NODE_TYPE_GRAPH) graph_free(node->op.child);
  operation_clear(&node->op);
  free(node->needs.list);
  free(node->needed_by.list);
  handle_remove(node);
  free(node);
}

void graph_free(CUgraph graph) {
  while (graph->last) node_free(graph->last); /* the last has few edges left: they go both ways */
  if (graph->memory) graph_memory_let_go(graph->memory, false);
  objects_drop(&graph->objects);
  handle_remove(graph);
  free(graph);
}

CUresult edge_add(CUgraphNode from, CUgraphNode to) {
  if (!list_add(&to->needs, from)) return CUDA_ERROR_OUT_OF_MEMORY;
  if (list_add(&from->needed_by, to)) return CUDA_SUCCESS;
  list_remove(&to->needs, from);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult edges_usable(CUgraph graph, const CUgraphNode *on, size_t count) {
  if (count && !on) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    if (!handle_is(on[i], HANDLE_NODE) || on[i]->in != graph) return CUDA_ERROR_INVALID_VALUE;
    for (size_t k = 0; k < i; k++)
      if (on[k] == on[i]) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult node_add(CUgraph graph, const CUgraphNode *on, size_t count, operation *op, CUgraphNode *out) {
  CUresult result = edges_usable(graph, on, count);
  CUgraphNode fresh = result == CUDA_SUCCESS ? calloc(1, sizeof *fresh) : NULL;
  if (!fresh || !handle_add(fresh, HANDLE_NODE)) {
    free(fresh);
    if (op->type == CU_GRAPH_NODE_TYPE_GRAPH) graph_free(op->child);
    operation_clear(op);
    return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
  }
  fresh->in = graph;
  fresh->id = fresh->original = next_node_id++;
  fresh->op = *op;
  *op = (operation){.type = CU_GRAPH_NODE_TYPE_EMPTY};
  fresh->previous = graph->last;
  if (graph->last) graph->last->next = fresh;
  else graph->first = fresh;
  graph->last = fresh;
  graph->count++;
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) result = edge_add(on[i], fresh);
  if (result != CUDA_SUCCESS) {
    node_free(fresh);
    return result;
  }
  if (fresh->op.type == CU_GRAPH_NODE_TYPE_GRAPH) fresh->op.child->inside = fresh;
  if (fresh->op.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || fresh->op.type == CU_GRAPH_NODE_TYPE_MEM_FREE) graph->has_memory_nodes = true;
  *out = fresh;
  return CUDA_SUCCESS;
}

bool node_after(CUgraphNode to, CUgraphNode from) {
  static uint64_t walk;
  node_list left = {0};
  bool found = false;
  walk++;
  if (!list_add(&left, to)) return false;
  while (left.count && !found) {
    CUgraphNode at = left.list[--left.count];
    if (at == from) found = true;
    if (at->seen == walk) continue;
    at->seen = walk;
    for (size_t i = 0; i < at->needs.count; i++)
      if (!list_add(&left, at->needs.list[i])) break;
  }
  free(left.list);
  return found;
}

CUresult graph_clone(CUgraph from, CUgraph *out) {
  if (from->has_memory_nodes) return CUDA_ERROR_NOT_SUPPORTED;
  CUgraph fresh = graph_new();
  CUresult result = fresh ? objects_copy(from->objects, &fresh->objects) : CUDA_ERROR_OUT_OF_MEMORY;
  uint32_t place = 0;
  CUgraphNode *copies = result == CUDA_SUCCESS ? calloc(from->count + 1, sizeof(CUgraphNode)) : NULL;
  if (!copies) result = CUDA_ERROR_OUT_OF_MEMORY;
  for (CUgraphNode n = from->first; n && result == CUDA_SUCCESS; n = n->next) {
    operation op;
    n->place = place;
    if (!operation_copy(&op, &n->op)) result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (op.type == CU_GRAPH_NODE_TYPE_GRAPH) result = graph_clone(n->op.child, &op.child);
    if (result == CUDA_SUCCESS) result = node_add(fresh, NULL, 0, &op, &copies[place]);
    if (result != CUDA_SUCCESS) break;
    copies[place]->original = n->id;
    copies[place]->window = n->window;
    copies[place++]->has_window = n->has_window;
  }
  for (CUgraphNode n = from->first; n && result == CUDA_SUCCESS; n = n->next)
    for (size_t i = 0; i < n->needs.count && result == CUDA_SUCCESS; i++) result = edge_add(copies[n->needs.list[i]->place], copies[n->place]);
  free(copies);
  if (result != CUDA_SUCCESS) {
    if (fresh) graph_free(fresh);
    return result;
  }
  fresh->original = from->id;
  *out = fresh;
  return CUDA_SUCCESS;
}

/* ---- entry points -------------------------------------------------------- */

EXPORT CUresult cuGraphCreate(CUgraph *out, unsigned int flags) {
  ENTER();
  if (!out || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  CUgraph fresh = graph_new();
  if (!fresh) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
  *out = fresh;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result == CUDA_SUCCESS && (graph->inside || graph->capture)) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) graph_free(graph);
  objects_finish();
  LEAVE(result);
}

EXPORT CUresult cuGraphClone(CUgraph *out, CUgraph original) {
  ENTER();
  CUresult result = graph_checked(original);
  if (result == CUDA_SUCCESS && !out) result = CUDA_ERROR_INVALID_VALUE;
  LEAVE(result == CUDA_SUCCESS ? graph_clone(original, out) : result);
}

EXPORT CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone) {
  ENTER();
  CUresult result = graph_checked(clone);
  if (result == CUDA_SUCCESS) result = node_checked(original, -1);
  if (result != CUDA_SUCCESS || !out || clone->original != original->in->id) LEAVE(CUDA_ERROR_INVALID_VALUE);
  for (CUgraphNode n = clone->first; n; n = n->next)
    if (n->original == original->id) {
      *out = n;
      LEAVE(CUDA_SUCCESS);
    }
  LEAVE(CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
  ENTER();
  CUresult result = node_checked(node, -1);
  if (result != CUDA_SUCCESS || !type) LEAVE(CUDA_ERROR_INVALID_VALUE);
  *type = node->op.type;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphDestroyNode(CUgraphNode node) {
  ENTER();
  CUresult result = node_checked(node, -1);
  if (result != CUDA_SUCCESS) LEAVE(result);
  if (node->in->has_memory_nodes || node->in->capture) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  node_free(node);
  LEAVE(CUDA_SUCCESS);
}

/* *count is room on the way in (when there is a list), and how many there are on the way out. */
static CUresult give(const node_list *from, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; nodes && i < *count; i++) {
    nodes[i] = i < from->count ? from->list[i] : NULL;
    if (data) data[i] = (CUgraphEdgeData){0};
  }
  if (!nodes || *count > from->count) *count = from->count;
  return CUDA_SUCCESS;
}

static CUresult nodes_of(CUgraph graph, bool roots, CUgraphNode *nodes, size_t *count) {
  node_list all = {0};
  ENTER();
  CUresult result = graph_checked(graph);
  for (CUgraphNode n = result == CUDA_SUCCESS ? graph->first : NULL; n && result == CUDA_SUCCESS; n = n->next)
    if ((!roots || !n->needs.count) && !list_add(&all, n)) result = CUDA_ERROR_OUT_OF_MEMORY;
  if (result == CUDA_SUCCESS) result = give(&all, nodes, NULL, count);
  free(all.list);
  LEAVE(result);
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) { return nodes_of(graph, false, nodes, count); }
EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) { return nodes_of(graph, true, nodes, count); }

static CUresult edges_of(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result != CUDA_SUCCESS || !count || !from != !to) LEAVE(CUDA_ERROR_INVALID_VALUE);
  size_t at = 0;
  for (CUgraphNode n = graph->first; n; n = n->next)
    for (size_t i = 0; i < n->needs.count; i++, at++) {
      if (!from || at >= *count) continue;
      from[at] = n->needs.list[i];
      to[at] = n;
      if (data) data[at] = (CUgraphEdgeData){0};
    }
  for (size_t i = at; from && i < *count; i++) from[i] = to[i] = NULL;
  if (!from || *count > at) *count = at;
  LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) { return edges_of(graph, from, to, NULL, count); }
EXPORT CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
  return edges_of(graph, from, to, data, count);
}

static CUresult neighbours(CUgraphNode node, bool before, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
  ENTER();
  CUresult result = node_checked(node, -1);
  LEAVE(result == CUDA_SUCCESS ? give(before ? &node->needs : &node->needed_by, nodes, data, count) : result);
}

EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count) { return neighbours(node, true, nodes, NULL, count); }
EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
  return neighbours(node, true, nodes, data, count);
}
EXPORT CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *count) { return neighbours(node, false, nodes, NULL, count); }
EXPORT CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
  return neighbours(node, false, nodes, data, count);
}

/* Programmatic edges are of kernels that start early: there are none here. */
static bool plain(const CUgraphEdgeData *data, size_t count) {
  static const CUgraphEdgeData none;
  for (size_t i = 0; data && i < count; i++)
    if (memcmp(&data[i], &none, sizeof none) != 0) return false;
  return true;
}

static CUresult change_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count, bool add) {
  ENTER();
  CUresult result = graph_checked(graph);
  if (result == CUDA_SUCCESS && count && (!from || !to)) result = CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS && !add && count && graph->has_memory_nodes) result = CUDA_ERROR_NOT_SUPPORTED;
  if (result == CUDA_SUCCESS && !plain(data, count)) result = CUDA_ERROR_NOT_SUPPORTED;
  /* all or none */
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
    if (!handle_is(from[i], HANDLE_NODE) || !handle_is(to[i], HANDLE_NODE) || from[i]->in != graph || to[i]->in != graph || from[i] == to[i] ||
        list_has(&to[i]->needs, from[i]) == add)
      result = CUDA_ERROR_INVALID_VALUE;
    for (size_t k = 0; k < i && result == CUDA_SUCCESS; k++)
      if (from[k] == from[i] && to[k] == to[i]) result = CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
    if (add) {
      result = edge_add(from[i], to[i]);
      continue;
    }
    list_remove(&to[i]->needs, from[i]);
    list_remove(&from[i]->needed_by, to[i]);
  }
  LEAVE(result);
}

EXPORT CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
  return change_edges(graph, from, to, NULL, count, true);
}
EXPORT CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count) {
  return change_edges(graph, from, to, data, count, true);
}
EXPORT CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
  return change_edges(graph, from, to, NULL, count, false);
}
EXPORT CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
                                             size_t count) {
  return change_edges(graph, from, to, data, count, false);
}

static void print_dot(FILE *file, CUgraph graph, const char *indent) {
  for (CUgraphNode n = graph->first; n; n = n->next) {
    fprintf(file, "%sn%llu [label=\"%llu %s\"];\n", indent, (unsigned long long)n->id, (unsigned long long)n->id, node_type_name(n->op.type));
    for (size_t i = 0; i < n->needs.count; i++)
      fprintf(file, "%sn%llu -> n%llu;\n", indent, (unsigned long long)n->needs.list[i]->id, (unsigned long long)n->id);
    if (n->op.type != CU_GRAPH_NODE_TYPE_GRAPH) continue;
    fprintf(file, "%ssubgraph cluster_%llu {\n", indent, (unsigned long long)n->op.child->id);
    print_dot(file, n->op.child, "    ");
    fprintf(file, "%s}\n", indent);
  }
}

EXPORT CUresult cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags) {
  (void)flags;
  ENTER();
  CUresult result = graph_checked(graph);
  FILE *file = result == CUDA_SUCCESS && path ? fopen(path, "we") : NULL;
  if (!file) LEAVE(result != CUDA_SUCCESS || !path ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM);
  fprintf(file, "digraph graph_%llu {\n", (unsigned long long)graph->id);
  print_dot(file, graph, "  ");
  fprintf(file, "}\n");
  LEAVE(fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM);
}
