package sock

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// caller is the process at the other end, as the kernel saw it when it
// connected.
type caller struct {
	credentials.CommonAuthInfo
	PID, UID, GID int
}

func (caller) AuthType() string { return "unix" }

// peers reads who connects. There is nothing to encrypt: the kernel carries
// what is said from one process to the other.
type peers struct{}

func (peers) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil, errors.New("read the caller's credentials: it is no unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, nil, fmt.Errorf("read the caller's credentials: %w", err)
	}
	var cred *unix.Ucred
	var got error
	if err := raw.Control(func(fd uintptr) { cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		got = err
	}
	if got != nil {
		return nil, nil, fmt.Errorf("read the caller's credentials: %w", got)
	}
	return c, caller{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		PID:            int(cred.Pid), UID: int(cred.Uid), GID: int(cred.Gid),
	}, nil
}

func (peers) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c, caller{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}

func (peers) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (peers) Clone() credentials.TransportCredentials { return peers{} }
func (peers) OverrideServerName(string) error         { return nil }

// callerOf is who made a call; all fields are -1 if that isn't known.
func callerOf(ctx context.Context) caller {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(caller); ok {
			return c
		}
	}
	return caller{PID: -1, UID: -1, GID: -1}
}
