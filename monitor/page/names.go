package page

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Names says who reads the names of holders.
type Names string

// The settings of Names.
const (
	// NamesAll shows them to everybody who reaches the port.
	NamesAll Names = "all"
	// NamesLocal shows them to who comes over the loopback, as kubectl
	// port-forward does, which Kubernetes authorises. Others see none.
	NamesLocal Names = "local"
	// NamesNamespace shows namespaces only.
	NamesNamespace Names = "namespace"
	// NamesNone shows none.
	NamesNone Names = "none"
)

// AllNames are the settings, for messages and completion.
var AllNames = []string{string(NamesAll), string(NamesLocal), string(NamesNamespace), string(NamesNone)}

// rights are what a reader sees of names.
type rights uint8

const (
	seesNone rights = iota
	seesNamespace
	seesAll
)

func (n Names) rights(r *http.Request) rights {
	switch n {
	case NamesAll:
		return seesAll
	case NamesNamespace:
		return seesNamespace
	case NamesLocal:
		if local(r) {
			return seesAll
		}
	}
	return seesNone
}

// local reports whether the request came over the loopback and means it: a name
// of somebody else's that resolves to the loopback would let a foreign page read
// this one in a viewer's browser.
func local(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !from.Addr().Unmap().IsLoopback() {
		return false
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	to, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && to.Unmap().IsLoopback()
}
