package extender

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// shutdownTimeout bounds the end: calls in flight may finish their writes.
const shutdownTimeout = 6 * time.Second

// Serve answers the verbs on one listener, with the given TLS settings, and
// health and metrics on the other, until the context ends. It closes both.
func (s *Server) Serve(ctx context.Context, verbs net.Listener, t *tls.Config, plain net.Listener) error {
	// Each connection that doesn't get through the handshake is a line there.
	errorLog := slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn)
	secure := &http.Server{Handler: s.Verbs(), TLSConfig: t, ErrorLog: errorLog,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second, WriteTimeout: 15 * time.Second, IdleTimeout: 10 * time.Minute}
	open := &http.Server{Handler: s.Plain(), ErrorLog: errorLog,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, WriteTimeout: 15 * time.Second, IdleTimeout: time.Minute}
	ended := make(chan error, 2)
	go func() { ended <- failed("verbs", secure.ServeTLS(verbs, "", "")) }()
	go func() { ended <- failed("health and metrics", open.Serve(plain)) }()
	running := 2
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
		running--
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err = errors.Join(err, secure.Shutdown(stop), open.Shutdown(stop))
	for range running {
		err = errors.Join(err, <-ended)
	}
	return err
}

func failed(what string, err error) error {
	if err == nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve %s: %w", what, err)
}
