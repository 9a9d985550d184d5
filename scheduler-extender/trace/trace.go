package trace

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/http"
	"strings"
)

// Header is where a caller says in which trace its request is.
const Header = "traceparent"

type key struct{}

// Handler gives each request an id, which ID finds in its context.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), key{}, Of(r.Header))))
	})
}

// ID is the request's id: 32 hexadecimal digits, or empty outside a Handler.
func ID(ctx context.Context) string {
	id, _ := ctx.Value(key{}).(string)
	return id
}

// Of is the id that a caller's headers name, or a new one where they name none.
func Of(h http.Header) string {
	// One header only: of several nobody could say which is meant.
	if v := h.Values(Header); len(v) == 1 {
		if id := parse(v[0]); id != "" {
			return id
		}
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], rand.Uint64())
	binary.BigEndian.PutUint64(b[8:], rand.Uint64()|1) // all zeros is no id
	return hex.EncodeToString(b[:])
}

// parse reads version-traceid-parentid-flags. A version above 00 may have more
// behind that; empty is returned for what isn't valid.
func parse(s string) string {
	if len(s) < 55 || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return ""
	}
	version, id, parent, flags := s[:2], s[3:35], s[36:52], s[53:55]
	switch {
	case !lowerHex(version) || !lowerHex(id) || !lowerHex(parent) || !lowerHex(flags):
	case version == "ff", version == "00" && len(s) > 55, len(s) > 55 && s[55] != '-':
	case strings.Trim(id, "0") == "", strings.Trim(parent, "0") == "":
	default:
		return id
	}
	return ""
}

func lowerHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
