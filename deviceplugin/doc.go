// Package deviceplugin is carve's side of the kubelet's device plugin
// protocol. It counts: each card stands for a number of slots, and the kubelet
// admits pods by them.
//
// It never hands out a device. Slots don't stand for cards, are always healthy
// and carry no topology: which card a container gets is the grant's to say,
// and an unhealthy or misplaced slot would only make the kubelet refuse pods
// that hold a perfectly good grant.
//
// Start reading at Plugin.
package deviceplugin
