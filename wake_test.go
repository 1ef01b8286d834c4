package weir_test

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// listeners counts the backends of a database that listen.
const listeners = "from pg_stat_activity where datname = current_database() and query ilike 'listen %'"

func handleInto(y *tally) weir.Handler {
	return weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		y.add(m.ID)
		return nil
	})
}

func TestWakeUpReachesOtherProcesses(t *testing.T) {
	t.Parallel()
	c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	other := openDSN(t, dsn, nil)
	handled := newTally()
	consume(t, other, "t", "g", handleInto(handled), &weir.ConsumerOptions{PollInterval: time.Minute})
	eventually(t, "it listens", func() bool { return value[int](t, conn, "select count(*)::int "+listeners) == 1 })
	for range 5 {
		ids := produced(t, c, "t", numbers(1)...)
		// Without a wake-up it would take a minute.
		took := within(t, 20*time.Second, "the message is handled", func() bool { return handled.count(ids[0]) == 1 })
		t.Logf("handled after %v", took.Round(time.Millisecond))
	}
	// A transaction of the caller's wakes nobody by itself.
	tx := start(t, conn)
	late, err := c.ProduceTx(t.Context(), tx, "t", numbers(1)...)
	noError(t, err)
	noError(t, tx.Commit(t.Context()))
	c.Wake("t")
	within(t, 20*time.Second, "the message is handled", func() bool { return handled.count(late[0].ID) == 1 })
}

// The role may connect as often as the pool does, and not once more: LISTEN, whose connection is not the pool's, cannot.
func TestListenRefused(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	topicAndGroup(t, admin, "t", "g", nil, nil)
	conn := connect(t, dsn)
	role := "narrow_" + value[string](t, conn, "select substr(md5(current_database()), 1, 12)")
	execute(t, conn, "create role "+role+" login connection limit 1")
	t.Cleanup(func() {
		ctx := context.Background()
		_, err := conn.Exec(ctx, "drop owned by "+role)
		if err == nil {
			_, err = conn.Exec(ctx, "drop role "+role)
		}
		if err != nil {
			t.Error(err)
		}
	})
	execute(t, conn, "grant usage on schema weir to "+role)
	execute(t, conn, "grant execute on all functions in schema weir to "+role)

	log := newTestLog(t)
	pool := newPool(t, dsn, func(config *pgxpool.Config) {
		config.ConnConfig.User = role
		config.MaxConns = 1
	})
	_, err := pool.Exec(t.Context(), "select 1") // the one connection there is
	noError(t, err)
	c, err := weir.New(pool, &weir.Options{Logger: log.Logger})
	noError(t, err)
	t.Cleanup(c.Close)
	handled := newTally()
	k := consume(t, c, "t", "g", handleInto(handled), &weir.ConsumerOptions{PollInterval: 100 * time.Millisecond})
	eventually(t, "there is a warning", func() bool { return strings.Contains(log.String(), "cannot listen for wake-ups") })
	for range 10 {
		ids := produced(t, admin, "t", numbers(1)...)
		within(t, 5*time.Second, "the message is handled", func() bool { return handled.count(ids[0]) == 1 })
	}
	k.stop()
	if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "too many connections") {
		t.Errorf("want one warning that names the reason, got:\n%s", text)
	}
}

func TestNoListen(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, &weir.Options{NoListen: true})
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	ear := connect(t, dsn)
	execute(t, ear, "listen \"weir:weir\"")
	handled := newTally()
	consume(t, c, "t", "g", handleInto(handled), nil)
	for range 10 {
		ids := produced(t, c, "t", numbers(1)...)
		eventually(t, "the message is handled", func() bool { return handled.count(ids[0]) == 1 })
	}
	if n := value[int](t, conn, "select count(*)::int "+listeners); n != 1 {
		t.Errorf("%d backends listen, want that of the test alone", n)
	}
	execute(t, conn, "notify \"weir:weir\", 'end'")
	n, err := ear.WaitForNotification(t.Context())
	if err != nil || n.Payload != "end" {
		t.Errorf("a client that does not listen notifies: %v, %v", n, err)
	}
}

func TestListenerTerminated(t *testing.T) {
	t.Parallel()
	c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	log := newTestLog(t)
	other := openDSN(t, dsn, &weir.Options{Logger: log.Logger})
	handled := newTally()
	const poll = 500 * time.Millisecond
	k := consume(t, other, "t", "g", handleInto(handled), &weir.ConsumerOptions{PollInterval: poll})
	eventually(t, "it listens", func() bool { return value[int](t, conn, "select count(*)::int "+listeners) == 1 })
	killed, sent := 0, 0
	var worst time.Duration
	for ; killed < 4; sent++ {
		killed += value[int](t, conn, "select count(pg_terminate_backend(pid))::int "+listeners)
		ids := produced(t, c, "t", numbers(1)...)
		// The bound has room for a busy machine; what the test looks for is a consumer that waits for its listener.
		took := within(t, poll+2*time.Second, "the message is handled", func() bool { return handled.count(ids[0]) == 1 })
		worst = max(worst, took)
	}
	t.Logf("%d listeners killed, the slowest of %d messages took %v with a poll of %v", killed, sent, worst.Round(time.Millisecond), poll)
	eventually(t, "it listens again", func() bool { return value[int](t, conn, "select count(*)::int "+listeners) == 1 })
	k.stop()
	if k.Stats().Lost != 0 || strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("stats are %+v, log:\n%s", k.Stats(), log)
	}
}

// proxy forwards connections to a server until it is told to stop, without closing them: then it is a network that loses
// everything.
type proxy struct {
	net.Listener
	to string

	mu     sync.Mutex
	all    []net.Conn
	frozen chan struct{} // closed: connections made before forward nothing any more
	deaf   bool          // new connections forward nothing either
	// passing is held while something goes through: after freeze nothing does
	passing sync.RWMutex
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	p := &proxy{Listener: l, to: to, frozen: make(chan struct{})}
	t.Cleanup(func() {
		l.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, c := range p.all {
			c.Close()
		}
	})
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.all = append(p.all, in)
			frozen, deaf := p.frozen, p.deaf
			p.mu.Unlock()
			if deaf {
				continue
			}
			out, err := net.Dial("tcp", p.to)
			if err != nil {
				in.Close()
				continue
			}
			p.mu.Lock()
			p.all = append(p.all, out)
			p.mu.Unlock()
			go p.forward(in, out, frozen)
			go p.forward(out, in, frozen)
		}
	}()
	return p
}

func (p *proxy) forward(to, from net.Conn, frozen chan struct{}) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if !p.pass(to, buffer[:n], err, frozen) {
			return
		}
	}
}

// pass hands on what was read, and that the connection was closed. It returns whether there can be more.
func (p *proxy) pass(to net.Conn, data []byte, read error, frozen chan struct{}) bool {
	p.passing.RLock()
	defer p.passing.RUnlock()
	select {
	case <-frozen: // what arrives is lost, also that it was closed
		return read == nil
	default:
	}
	if len(data) > 0 {
		if _, err := to.Write(data); err != nil {
			return false
		}
	}
	if read == io.EOF {
		to.Close()
	}
	return read == nil
}

// freeze loses everything that goes through the connections there are, and, with deaf, through those to come.
func (p *proxy) freeze(deaf bool) {
	p.passing.Lock()
	defer p.passing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.frozen)
	p.frozen = make(chan struct{})
	p.deaf = deaf
}

// dsn leads a DSN through the proxy.
func (p *proxy) dsn(t *testing.T, dsn string) string {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	noError(t, err)
	return "postgres://" + config.User + "@" + p.Addr().String() + "/" + config.Database + "?sslmode=disable"
}

func TestHalfOpenConnections(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, &pgtest.Options{Fast: true, TCP: true})
	c, dsn := openOn(t, server, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	p := newProxy(t, server.TCPAddr())
	through := openDSN(t, p.dsn(t, dsn), nil)
	handled := newTally()
	k := consume(t, through, "t", "g", handleInto(handled), nil)
	// Several connections of the pool, so that several are half open afterwards.
	var open sync.WaitGroup
	for range 6 {
		open.Go(func() {
			if _, err := through.Topics(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	open.Wait()
	ids := produced(t, c, "t", numbers(5)...)
	eventually(t, "it works", func() bool { return len(handled.missing(ids)) == 0 })
	drained(t, c, "t", "g")

	p.freeze(false)
	// A poll that went through before ends before the messages are there. A claim that is made while its answer is lost is another
	// matter: its messages come again when its lease expires.
	conn := connect(t, dsn)
	eventually(t, "the server is done with what came through", func() bool {
		return value[int](t, conn, `
			select count(*)::int from pg_stat_activity
			where datname = current_database() and backend_type = 'client backend' and state <> 'idle' and pid <> pg_backend_pid()`) == 0
	})
	ids = produced(t, c, "t", numbers(5)...)
	took := within(t, 15*time.Second, "it works again", func() bool { return len(handled.missing(ids)) == 0 })
	t.Logf("resumed after %v", took.Round(time.Millisecond))
	within(t, 30*time.Second, "it listens again", func() bool {
		return value[int](t, conn, "select count(*)::int "+listeners+" and backend_start > clock_timestamp() - $1::interval", took+time.Minute) >= 1
	})

	p.freeze(true)
	began := time.Now()
	k.stop()
	through.Close()
	stopped := time.Since(began)
	t.Logf("stopped after %v without a network", stopped.Round(time.Millisecond))
	if stopped > 30*time.Second {
		t.Errorf("stopping took %v", stopped)
	}
}
