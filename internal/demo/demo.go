// Package demo shows Weir at work: producers whose transactions overlap and roll back, three groups that read them, one of
// which loses a process to SIGKILL, a picture of it all, and a verdict that rests on what the database holds and on what
// the handlers put on record.
package demo

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/internal/pgtest"
)

// Options are the options of Run.
type Options struct {
	// DSN is the database to run on, which has Weir in it; "" starts a private server.
	DSN string
	// Schema is the one that Weir is installed in. Default "weir".
	Schema string
	// For is how long producers produce, at least 1 s. Default 15 s.
	For time.Duration
	// Rate is how many messages all producers produce a second, together. Default 2,000. Rate times For is at most
	// MaxMessages.
	Rate int
	// Producers is how many there are, 1 to 100. Default 5.
	Producers int
	// Seed decides sizes, accounts, and which transactions are held open or rolled back. Default: a random one.
	Seed uint64
	// Plain shows lines instead of a live picture, as does an Out that is no terminal.
	Plain bool
	// Keep leaves topic and ledger in the database (of DSN), and the record of the handlers in its folder.
	Keep bool
	// Out receives the picture. Default: none.
	Out io.Writer
	// Consumer makes the command of a consumer's process, which calls Consume.
	Consumer func() (*exec.Cmd, error)
	// Quit, when it is closed, ends a run without its verdict.
	Quit <-chan struct{}

	// tamper changes the record before it is judged.
	tamper func(folder string) error
}

// MaxMessages bounds a run: its whole record is judged in memory.
const MaxMessages = 500_000

const (
	processes  = 3 // of the group that processes of their own read
	drainLimit = 30 * time.Second
	// handlerTime is what a handler of that group takes on average.
	handlerTime = 4 * time.Millisecond
)

// ErrQuit is the error of a run that Options.Quit ended.
var ErrQuit = errors.New("given up before the verdict")

func (o *Options) complete() error {
	if o.Schema == "" {
		o.Schema = "weir"
	}
	if o.For == 0 {
		o.For = 15 * time.Second
	}
	if o.Rate == 0 {
		o.Rate = 2000
	}
	if o.Producers == 0 {
		o.Producers = 5
	}
	for o.Seed == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		o.Seed = binary.NativeEndian.Uint64(b[:]) % 1_000_000
	}
	if o.Out == nil {
		o.Out = io.Discard
	}
	switch {
	case o.For < time.Second:
		return fmt.Errorf("%w: duration is %v: it must be at least 1s", weir.ErrInvalid, o.For)
	case o.Rate < 1:
		return fmt.Errorf("%w: rate is %d: it must be at least 1 message a second", weir.ErrInvalid, o.Rate)
	case o.Producers < 1 || o.Producers > 100:
		return fmt.Errorf("%w: producers is %d: it must be from 1 to 100", weir.ErrInvalid, o.Producers)
	case float64(o.Rate)*o.For.Seconds() > MaxMessages:
		return fmt.Errorf("%w: rate %d for %v is more than %s messages: lower one of them", weir.ErrInvalid, o.Rate, o.For, number(MaxMessages))
	}
	return nil
}

// lease is that of consumers: short, so that a takeover is there to see.
func (o *Options) lease() time.Duration {
	return min(max(o.For/5, 500*time.Millisecond), 2*time.Second)
}

// demo is one run.
type demo struct {
	o      Options
	server string
	folder string
	topic  string
	ledger string
	log    string // the table that holds the messages

	pool *pgxpool.Pool
	c    *weir.Client

	life  context.Context // of everything but the producers
	end   context.CancelFunc
	began time.Time
	tasks sync.WaitGroup

	rec      *history.Recorder // of the producers, and of what is seen of the topic
	children []*child
	naive    naive
	state    state
	undo     []func(ctx context.Context) error

	committed atomic.Int64 // messages, for the picture alone
}

// Run runs the demo until its time is over or ctx ends, waits until all groups have handled everything, and judges. It leaves
// nothing behind. An error means that there is no verdict, or that something could not be removed.
func Run(ctx context.Context, o Options) (v Verdict, err error) {
	if err := o.complete(); err != nil {
		return v, err
	}
	d := &demo{o: o}
	d.state.d = d
	d.life, d.end = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		d.end()
		d.tasks.Wait()
		for i := len(d.undo) - 1; i >= 0; i-- {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
			err = errors.Join(err, d.undo[i](ctx))
			cancel()
		}
	}()
	if o.Quit != nil {
		d.tasks.Go(func() {
			select {
			case <-o.Quit:
				d.end()
			case <-d.life.Done():
			}
		})
	}
	if err := d.prepare(ctx); err != nil {
		return v, err
	}
	return d.run(ctx)
}

// prepare makes what a run needs, and notes how to remove it.
func (d *demo) prepare(ctx context.Context) error {
	private := d.o.DSN == ""
	if private {
		s, err := pgtest.Start(ctx, nil)
		if err != nil {
			return err
		}
		d.undo = append(d.undo, s.Stop)
		if err := s.CreateDatabase(ctx, "demo"); err != nil {
			return err
		}
		d.o.DSN = s.DSN("demo")
	}
	config, err := poolConfig(d.o.DSN, "weir demo", d.o.Producers+10)
	if err != nil {
		return err
	}
	if d.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	d.undo = append(d.undo, func(context.Context) error { d.pool.Close(); return nil })
	if d.c, err = weir.New(d.pool, &weir.Options{Schema: d.o.Schema, Logger: logger(&lines{s: &d.state})}); err != nil {
		return err
	}
	d.undo = append(d.undo, func(context.Context) error { d.c.Close(); return nil })
	if private {
		if err := d.c.Migrate(ctx); err != nil {
			return err
		}
	}
	if err := d.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		version, _, _ := strings.Cut(conn.Conn().PgConn().ParameterStatus("server_version"), " ")
		d.server = "PostgreSQL " + version
		if private {
			d.server = "private " + d.server
		}
		return nil
	}); err != nil {
		return fmt.Errorf("contact the server: %w", err)
	}

	if d.folder, err = os.MkdirTemp("", "weir-demo-"); err != nil {
		return err
	}
	d.undo = append(d.undo, func(context.Context) error {
		if d.o.Keep {
			return nil
		}
		return os.RemoveAll(d.folder)
	})
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	d.topic = "weir_demo_" + hex.EncodeToString(id[:])
	d.ledger = d.topic + "_ledger"

	// The name is as good as unique. If it is not, nothing of another's is touched: what exists fails the run before there is
	// anything to undo.
	_, err = d.c.Topic(ctx, d.topic)
	if err == nil {
		return fmt.Errorf("topic %q exists already: run the demo again", d.topic)
	}
	if !errors.Is(err, weir.ErrTopicNotFound) {
		return err
	}
	if _, err := d.pool.Exec(ctx, d.text("ledger_create")); err != nil {
		return fmt.Errorf("create the ledger, table %q: %w", d.ledger, err)
	}
	d.undo = append(d.undo, func(ctx context.Context) error {
		if d.o.Keep || private {
			return nil
		}
		_, err := d.pool.Exec(ctx, d.text("ledger_drop"))
		return named("drop the ledger", err)
	})
	if err := d.c.CreateTopic(ctx, d.topic, nil); err != nil {
		return err
	}
	d.undo = append(d.undo, func(ctx context.Context) error {
		if d.o.Keep || private {
			return nil
		}
		_, err := d.c.DropTopic(ctx, d.topic, nil)
		return err
	})
	t, err := d.c.Topic(ctx, d.topic)
	if err != nil {
		return err
	}
	d.log = t.Log
	if _, err := d.visible(ctx); err != nil {
		return fmt.Errorf("read the log: %w: connect as the role that Weir was installed by", err)
	}
	for _, g := range groups {
		if err := d.c.CreateGroup(ctx, d.topic, g.name, &weir.GroupOptions{RetryDelay: 100 * time.Millisecond}); err != nil {
			return err
		}
	}
	return nil
}

// run is the run itself.
func (d *demo) run(ctx context.Context) (v Verdict, err error) {
	d.began = time.Now()
	d.rec = history.New()
	file, err := os.Create(filepath.Join(d.folder, "producers.ndjson"))
	if err != nil {
		return v, err
	}
	defer file.Close()
	d.rec.Stream(file)

	consuming, stopConsuming := context.WithCancel(d.life)
	var consumers sync.WaitGroup
	defer func() {
		stopConsuming()
		consumers.Wait()
		d.stopChildren()
	}()
	for i, g := range groups {
		if g.processes {
			continue
		}
		k, closeRecord, err := d.consumer(g, int32(i+1))
		if err != nil {
			return v, err
		}
		consumers.Go(func() {
			defer closeRecord()
			if err := k.Run(consuming); err != nil {
				d.state.event("group %s stopped: %v", g.name, err)
			}
		})
	}
	if err := d.startChildren(); err != nil {
		return v, err
	}
	reading, stopReading := context.WithCancel(d.life)
	var readers sync.WaitGroup
	defer func() { stopReading(); readers.Wait() }()
	readers.Go(func() { d.naive.read(reading, d) })

	show := d.state.show(d.o.Out, d.o.Plain)
	defer show.close()
	watching, stopWatching := context.WithCancel(d.life)
	var watch sync.WaitGroup
	watch.Go(func() { d.watch(watching, show) })
	defer func() { stopWatching(); watch.Wait() }()

	d.began = time.Now()
	d.state.phase("producing")
	producing, stopProducing := context.WithTimeout(ctx, d.o.For)
	defer stopProducing()
	stopOnQuit := context.AfterFunc(d.life, stopProducing)
	defer stopOnQuit()
	var killing sync.WaitGroup
	killing.Go(func() { d.kill(producing) })
	d.produce(producing)
	v.EndedEarly = ctx.Err() != nil
	v.Seconds = seconds(time.Since(d.began))
	if v.EndedEarly {
		d.state.event("interrupted: producing ends here")
	}
	killing.Wait()

	drained := time.Now()
	d.state.phase("draining")
	v.Drained = d.drain()
	v.DrainSeconds = seconds(time.Since(drained))
	readers.Go(func() { pause(reading, 3*naiveEvery); stopReading() }) // it reads the end as well
	readers.Wait()
	d.state.phase("done")
	stopWatching()
	watch.Wait()
	stopConsuming()
	consumers.Wait()
	d.stopChildren()
	if d.life.Err() != nil {
		return v, ErrQuit
	}
	show.last()
	if d.o.tamper != nil {
		if err := d.o.tamper(d.folder); err != nil {
			return v, err
		}
	}
	if err := d.judge(&v); err != nil {
		return v, fmt.Errorf("no verdict: %w", err)
	}
	return v, nil
}

// drain waits until every group has handled what there is.
func (d *demo) drain() bool {
	ctx, cancel := context.WithTimeout(d.life, drainLimit)
	defer cancel()
	for {
		head, err := d.visible(ctx)
		var list []weir.Group
		if err == nil {
			list, err = d.c.Groups(ctx, d.topic)
		}
		done := err == nil && len(list) == len(groups)
		for _, g := range list {
			done = done && g.Committed >= head && g.Leases == 0 && g.Retrying == 0
		}
		if done {
			return true
		}
		if pause(ctx, 50*time.Millisecond); ctx.Err() != nil {
			d.state.event("not everything is handled after %v", drainLimit)
			return false
		}
	}
}

// visible is the highest id that is visible.
func (d *demo) visible(ctx context.Context) (head int64, err error) {
	err = d.pool.QueryRow(ctx, d.text("head")).Scan(&head)
	return head, err
}

// poolConfig is for a pool of the demo's own.
func poolConfig(dsn, name string, size int) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("dsn: %w", err)
	}
	config.ConnConfig.RuntimeParams["application_name"] = name
	config.MaxConns = int32(size)
	return config, nil
}

// logger hands on what an operator should know, without the time, which each event of the demo has.
func logger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{
		Level: slog.LevelWarn,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			switch a.Key {
			case slog.TimeKey, slog.LevelKey, "topic", "consumer":
				return slog.Attr{}
			case slog.MessageKey:
				return slog.String("weir", a.Value.String())
			}
			return a
		},
	}))
}

func named(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond).Milliseconds()) / 1000
}

// number writes thousands apart.
func number[T int | int64](n T) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural[T int | int64](n T, one, many string) string {
	if n == 1 {
		return number(n) + " " + one
	}
	return number(n) + " " + many
}
