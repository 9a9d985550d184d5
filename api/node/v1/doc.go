// Package nodev1 is the local API of a node's agent: the messages of
// node.proto and, in node_grpc.pb.go, client and server. All but this file is
// generated from that description by cmd/generate-nodeapi (make generate).
//
// It decides nothing. The server is monitor/sock; whoever is on the node and
// has no API server (the command line, the hook of plain OCI runtimes) is a
// client of it.
package nodev1
