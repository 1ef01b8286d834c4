package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// wire counts round trips of connections: how often something was sent after something was received. What is sent in one go without
// waiting for an answer is one, however much it is.
type wire struct {
	trips atomic.Int64
}

type wireConn struct {
	net.Conn
	w       *wire
	waiting atomic.Bool // something was sent, and nothing received since
}

func (c *wireConn) Write(b []byte) (int, error) {
	if !c.waiting.Swap(true) {
		c.w.trips.Add(1)
	}
	return c.Conn.Write(b)
}

func (c *wireConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.waiting.Store(false)
	}
	return n, err
}

// pool opens a pool whose round trips are counted. A proxy, where there is one, is connected to in place of the server.
func (w *wire) pool(ctx context.Context, dsn string, conns int, through *proxy, configure func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	if configure != nil {
		configure(config)
	}
	dial := (&net.Dialer{}).DialContext
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if through != nil {
			network, address = "tcp", through.listener.Addr().String()
		}
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &wireConn{Conn: c, w: w}, nil
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// proxy passes TCP connections on to the server's socket, and what either side sends arrives half of delay later: a round trip takes
// delay longer. Bytes that follow each other closely are delayed together, not one after the other.
type proxy struct {
	listener net.Listener
	target   string
	delay    time.Duration
	running  sync.WaitGroup
	mu       sync.Mutex
	conns    []net.Conn
}

func newProxy(dsn string, delay time.Duration) (*proxy, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{
		listener: listener, delay: delay,
		target: filepath.Join(config.ConnConfig.Host, fmt.Sprintf(".s.PGSQL.%d", config.ConnConfig.Port)),
	}
	p.running.Go(p.accept)
	return p, nil
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("unix", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		p.running.Go(func() { p.pass(client, server) })
		p.running.Go(func() { p.pass(server, client) })
	}
}

// pass sends on what arrives, each piece when its time has come.
func (p *proxy) pass(from, to net.Conn) {
	type piece struct {
		bytes []byte
		due   time.Time
	}
	pieces := make(chan piece, 4096)
	var sending sync.WaitGroup
	sending.Go(func() {
		for x := range pieces {
			time.Sleep(time.Until(x.due))
			if _, err := to.Write(x.bytes); err != nil {
				_ = from.Close() // which ends its reader
			}
		}
		_ = to.Close()
	})
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			pieces <- piece{append([]byte(nil), buffer[:n]...), time.Now().Add(p.delay / 2)}
		}
		if err != nil {
			break
		}
	}
	close(pieces)
	sending.Wait()
}

func (p *proxy) close() error {
	err := p.listener.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		if e := c.Close(); e != nil && !errors.Is(e, net.ErrClosed) && !errors.Is(e, io.EOF) {
			err = errors.Join(err, e)
		}
	}
	p.mu.Unlock()
	p.running.Wait()
	return err
}
