// Package lab starts a real Kubernetes cluster of one node on this machine, in
// namespaces of its own: etcd, kube-apiserver, kube-controller-manager,
// kube-scheduler, kube-proxy, containerd with NRI and a kubelet, all built from
// Go modules. Tests and demonstrations install into it as a user would.
//
// The machine stays as it was. One process holds a mount, a network, a PID and
// a UTS namespace; /run, /etc, /opt, /var/lib and /var/log in there are private
// copies; the few kernel settings that the kubelet writes for a whole machine
// are plain files. When the holder dies, every process, mount and interface of
// the lab dies with it, and Down removes the cgroups and files that are left.
//
// A lab is a folder. Any process may attach to it with Open: the state file in
// it says which processes run. Start reading at Up.
//
// The package needs root on Linux. It does not touch the machine's network, and
// the lab has no route out of its own.
package lab
