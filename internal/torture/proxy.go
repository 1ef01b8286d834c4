package torture

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// proxy stands before the server for one process, and makes trouble with what goes through.
type proxy struct {
	listener net.Listener
	dial     func() (net.Conn, error)
	tasks    sync.WaitGroup

	mu    sync.Mutex
	armed string // what happens to the next request
	spare bool   // armed waits for a commit
	hit   chan struct{}
	links map[*link]bool
	ended bool
}

// link is one connection through the proxy.
type link struct {
	client, server net.Conn

	mu      sync.Mutex
	swallow bool // nothing goes through, and nobody is told
	silent  bool // the next answer ends it instead
}

func (l *link) close() {
	_ = l.client.Close()
	_ = l.server.Close()
}

func newProxy(dial func() (net.Conn, error)) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, dial: dial, links: map[*link]bool{}}
	p.tasks.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.tasks.Go(func() { p.serve(client) })
		}
	})
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.ended = true
	for l := range p.links {
		l.close()
	}
	p.mu.Unlock()
	p.tasks.Wait()
}

// arm has a fault happen to the next request, at first to the next commit only. It reports whether it happened.
func (p *proxy) arm(fault string, within time.Duration) bool {
	hit := make(chan struct{})
	p.mu.Lock()
	p.armed, p.spare, p.hit = fault, true, hit
	p.mu.Unlock()
	for _, any := range []bool{false, true} {
		p.mu.Lock()
		p.spare = !any
		p.mu.Unlock()
		select {
		case <-hit:
			return true
		case <-time.After(within / 2):
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-hit:
		return true
	default:
		p.armed = ""
		return false
	}
}

// take gives the fault that happens to this request.
func (p *proxy) take(request []byte) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.armed == "" || p.spare && !bytes.Contains(request, []byte("commit\x00")) {
		return ""
	}
	fault := p.armed
	p.armed = ""
	close(p.hit)
	return fault
}

// halfOpen swallows what comes through all connections that there are, for d; then their servers' ends are closed, as a
// server does that finds nobody at the other end.
func (p *proxy) halfOpen(d time.Duration) int {
	p.mu.Lock()
	var all []*link
	for l := range p.links {
		all = append(all, l)
		l.mu.Lock()
		l.swallow = true
		l.mu.Unlock()
	}
	p.mu.Unlock()
	time.Sleep(d)
	for _, l := range all {
		_ = l.server.Close()
	}
	return len(all)
}

func (p *proxy) serve(client net.Conn) {
	server, err := p.dial()
	if err != nil {
		_ = client.Close()
		return
	}
	l := &link{client: client, server: server}
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		l.close()
		return
	}
	p.links[l] = true
	p.mu.Unlock()
	end := func() {
		l.mu.Lock()
		swallowed := l.swallow
		l.mu.Unlock()
		if swallowed {
			return // both stay as they are until halfOpen or the client ends
		}
		l.close()
	}
	p.tasks.Go(func() {
		defer end()
		b := make([]byte, 1<<16)
		for {
			n, err := server.Read(b)
			if err != nil {
				return
			}
			l.mu.Lock()
			swallow, silent := l.swallow, l.silent
			l.mu.Unlock()
			if silent {
				return
			}
			if swallow {
				continue
			}
			if _, err := client.Write(b[:n]); err != nil {
				return
			}
		}
	})
	defer func() {
		l.close()
		p.mu.Lock()
		delete(p.links, l)
		p.mu.Unlock()
	}()
	b := make([]byte, 1<<16)
	for {
		n, err := client.Read(b)
		if err != nil {
			return
		}
		l.mu.Lock()
		swallow := l.swallow
		l.mu.Unlock()
		if swallow {
			continue
		}
		fault := p.take(b[:n])
		switch fault {
		case "cut-before":
			return
		case "cut-answer":
			l.mu.Lock()
			l.silent = true
			l.mu.Unlock()
		}
		if _, err := server.Write(b[:n]); err != nil || fault == "cut-after" {
			return
		}
	}
}
