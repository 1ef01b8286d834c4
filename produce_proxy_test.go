package weir_test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// fault is what becomes of a request on its way to the server, or of its answer.
type fault int

const (
	pass fault = iota
	// cutBefore: the request does not reach the server
	cutBefore
	// cutAtOnce: it does, and the connection is cut at the same moment
	cutAtOnce
	// cutAfter: it is answered, and nothing of the answer comes back
	cutAfter
	// cutWithin: a part of the answer comes back
	cutWithin
	// hold: the client's side is cut; the request waits here until release delivers it
	hold
	// cutLater: it does; the client's side is cut by cut
	cutLater
)

// cancelRequest is the code of a request to cancel another connection's statement. The driver sends it when a connection breaks.
// It need not arrive, and does not.
const cancelRequest = 80877102

// wire stands between a client and a server, and cuts connections at moments that a test chooses.
type wire struct {
	t             *testing.T
	dsn           string // of this side
	network, addr string // of the server
	listener      net.Listener

	mu sync.Mutex
	// decide says what becomes of a request: what the client sends up to the message that it expects an answer to
	decide func(request []byte) fault
	down   bool // no connection is taken
	conns  map[*link]bool
	held   []*link
	within int // bytes of the next answer that come back with cutWithin
}

// link is one connection through it.
type link struct {
	p              *wire
	client, server net.Conn

	mu      sync.Mutex
	state   fault
	left    int           // bytes of the answer to pass, with cutWithin
	request []byte        // with hold
	answer  []byte        // of a request that was held
	ready   chan struct{} // the answer has come
}

func newWire(t *testing.T, dsn string) *wire {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	noError(t, err)
	p := &wire{t: t, conns: map[*link]bool{}}
	p.network, p.addr = pgconn.NetworkAddress(config.Host, config.Port)
	p.listener, err = net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	p.dsn = fmt.Sprintf("host=127.0.0.1 port=%d user=%s dbname=%s sslmode=disable",
		p.listener.Addr().(*net.TCPAddr).Port, config.User, config.Database)
	var work sync.WaitGroup
	work.Go(func() {
		for {
			client, err := p.listener.Accept()
			if err != nil {
				return
			}
			work.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		p.listener.Close()
		p.mu.Lock()
		for l := range p.conns {
			l.close()
		}
		p.mu.Unlock()
		work.Wait()
	})
	return p
}

// set has f decide about requests that are such; others pass.
func (p *wire) set(such func(request string) bool, f func() fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decide = func(request []byte) fault {
		if !such(string(request)) {
			return pass
		}
		return f()
	}
}

// isMarked tells the requests that produce marked messages.
func isMarked(request string) bool { return strings.Contains(request, "marked") }

// isCommit tells the request by which Copy ends its transaction: it executes two statements.
func isCommit(request string) bool {
	return strings.Count(request, "E\x00\x00\x00\t\x00\x00\x00\x00\x00") == 2
}

// setDown has it refuse connections, or take them again.
func (p *wire) setDown(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
}

// release delivers the oldest request that is held, and returns the server's answer.
func (p *wire) release() string {
	p.t.Helper()
	p.mu.Lock()
	if len(p.held) == 0 {
		p.mu.Unlock()
		p.t.Fatal("no request is held")
	}
	l := p.held[0]
	p.held = p.held[1:]
	p.mu.Unlock()
	_, err := l.server.Write(l.request)
	noError(p.t, err)
	<-l.ready
	l.server.Close()
	return string(l.answer)
}

// cut cuts the client's side of the connections whose request was to be cut later.
func (p *wire) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.conns {
		l.mu.Lock()
		if l.state == cutLater {
			l.client.Close()
		}
		l.mu.Unlock()
	}
}

func (p *wire) serve(client net.Conn) {
	p.mu.Lock()
	down := p.down
	p.mu.Unlock()
	if down {
		client.Close()
		return
	}
	server, err := net.Dial(p.network, p.addr)
	if err != nil {
		client.Close()
		return
	}
	l := &link{p: p, client: client, server: server, ready: make(chan struct{})}
	p.mu.Lock()
	p.conns[l] = true
	p.mu.Unlock()
	var work sync.WaitGroup
	work.Go(l.requests)
	work.Go(l.answers)
	work.Wait()
	l.close()
	p.mu.Lock()
	delete(p.conns, l)
	p.mu.Unlock()
}

func (l *link) close() {
	l.client.Close()
	l.server.Close()
}

// message reads a message of PostgreSQL's protocol; the first one of a client has no type.
func message(r io.Reader, typed bool) ([]byte, error) {
	head := make([]byte, 5)
	if !typed {
		head = head[:4]
	}
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[len(head)-4:]) - 4
	text := append(head, make([]byte, size)...)
	_, err := io.ReadFull(r, text[len(head):])
	return text, err
}

// requests passes what the client sends.
func (l *link) requests() {
	text, err := message(l.client, false)
	if err == nil && binary.BigEndian.Uint32(text[4:]) == cancelRequest {
		err = io.EOF
	}
	if err == nil {
		_, err = l.server.Write(text)
	}
	var request []byte
	for err == nil {
		if text, err = message(l.client, true); err != nil {
			break
		}
		request = append(request, text...)
		if !strings.ContainsRune("SQcdfXH", rune(text[0])) { // the client sends more before it waits
			continue
		}
		l.p.mu.Lock()
		what := pass
		if l.p.decide != nil {
			what = l.p.decide(request)
		}
		within := l.p.within
		l.p.mu.Unlock()
		l.mu.Lock()
		l.state, l.left = what, within
		if what == hold {
			l.request = request
		}
		l.mu.Unlock()
		switch what {
		case cutBefore:
			l.close()
			return
		case hold:
			l.p.mu.Lock()
			l.p.held = append(l.p.held, l)
			l.p.mu.Unlock()
			l.client.Close()
			return
		}
		_, err = l.server.Write(request)
		request = nil
		if what == cutAtOnce {
			l.close()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != cutLater { // else the server is not to notice
		l.server.Close()
	}
}

// answers passes what the server sends.
func (l *link) answers() {
	defer l.client.Close()
	for {
		text, err := message(l.server, true)
		if err != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.state == hold {
				close(l.ready)
			}
			return
		}
		l.mu.Lock()
		state := l.state
		l.mu.Unlock()
		switch state {
		case pass, cutLater:
			_, _ = l.client.Write(text)
			if state == cutLater && text[0] == 'Z' {
				l.server.Close()
			}
		case hold:
			l.answer = append(l.answer, text...)
			if text[0] == 'Z' {
				close(l.ready)
				return
			}
		case cutWithin:
			if l.left < len(text) {
				_, _ = l.client.Write(text[:l.left])
				l.close()
				return
			}
			l.left -= len(text)
			_, _ = l.client.Write(text)
			if text[0] == 'Z' {
				l.mu.Lock()
				l.state = pass // it was shorter
				l.mu.Unlock()
			}
		case cutAfter:
			if text[0] == 'Z' { // what it has answered by now is committed
				l.close()
				return
			}
		}
	}
}
