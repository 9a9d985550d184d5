package sock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/carve-gpu/carve/api"
	nodev1 "github.com/carve-gpu/carve/api/node/v1"
)

// Client calls the agent of this node.
type Client struct {
	conn *grpc.ClientConn
	node nodev1.NodeClient
	path string
}

// Dial connects to an agent's socket. The error says why nobody answers.
func Dial(ctx context.Context, path string) (*Client, error) {
	// Tried first by hand: gRPC would hide the cause.
	var d net.Dialer
	probe, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("reach the node's agent: %w", explain(path, err))
	}
	probe.Close()
	conn, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(peers{}),
		grpc.WithNoProxy(), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, fmt.Errorf("reach the node's agent: %w", err)
	}
	return &Client{conn, nodev1.NewNodeClient(conn), path}, nil
}

// ErrNoAgent says that nobody serves the socket.
var ErrNoAgent = errors.New("no agent serves this socket")

func explain(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: there is no %s (does the carve-node pod of this node run? is this a node?)", ErrNoAgent, path)
	case errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w: %s is left over from one that ended (look at the carve-node pod of this node)", ErrNoAgent, path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w (root and members of the node's group carve may)", err)
	}
	return err
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// said turns a call's error into a plain one.
func (c *Client) said(call string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of the node's agent: %s", call, status.Convert(err).Message())
}

// Cards calls ListCards.
func (c *Client) Cards(ctx context.Context) (*nodev1.ListCardsResponse, error) {
	r, err := c.node.ListCards(ctx, &nodev1.ListCardsRequest{})
	return r, c.said("ListCards", err)
}

// Slices calls ListSlices for all cards.
func (c *Client) Slices(ctx context.Context) (*nodev1.ListSlicesResponse, error) {
	r, err := c.node.ListSlices(ctx, &nodev1.ListSlicesRequest{})
	return r, c.said("ListSlices", err)
}

// Doctor calls Doctor.
func (c *Client) Doctor(ctx context.Context) ([]api.Finding, error) {
	r, err := c.node.Doctor(ctx, &nodev1.DoctorRequest{})
	if err != nil {
		return nil, c.said("Doctor", err)
	}
	var out []api.Finding
	for _, f := range r.GetFindings() {
		out = append(out, api.Finding{
			Check: f.GetCheck(), Level: api.Level(f.GetLevel()), Where: f.GetWhere(), What: f.GetWhat(), Why: f.GetWhy(), Do: f.GetRemedy(),
		})
	}
	return out, nil
}

// Resize calls Resize.
func (c *Client) Resize(ctx context.Context, r *nodev1.ResizeRequest) error {
	_, err := c.node.Resize(ctx, r)
	return c.said("Resize", err)
}

// Watch calls Watch and hands each event to told, until ctx ends, the agent
// ends, or told returns an error, which Watch then returns.
func (c *Client) Watch(ctx context.Context, usage bool, told func(*nodev1.WatchResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.node.Watch(ctx, &nodev1.WatchRequest{Usage: usage})
	if err != nil {
		return c.said("Watch", err)
	}
	for {
		e, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return c.said("Watch", err)
		}
		if err := told(e); err != nil {
			return err
		}
	}
}
