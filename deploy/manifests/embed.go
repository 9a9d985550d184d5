// Package manifests carries the manifests of this version, so that doctor can
// compare a cluster with them. `kubectl apply -k` reads the same files.
package manifests

import "embed"

// Files are the manifests as they lie here, kustomization.yaml among them.
//
//go:embed *.yaml crds/*.yaml
var Files embed.FS
