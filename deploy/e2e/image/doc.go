// Package image writes container images as OCI layout tars straight from files
// of this machine: no daemon, no registry, no base image. containerd takes them
// by `ctr -n k8s.io images import`.
//
// It knows the few images of this project: see Pause, Base, Carve and Program.
// It never runs anything and never reads anything but the files it is given
// and, for dynamic programs, the libraries that these need.
package image
