package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Peer is a system that Weir is compared with, or Weir itself. Each runs in the same shape: producers and consumer are
// goroutines of this process, with connections of their own; what stores the messages is another process.
type Peer struct {
	// Name is what it is called by: one lower-case word. Short says what is measured.
	Name, Short string
	// Missing says what of it is not installed, nil if nothing; Install is the line that installs it. A Go module is part of this program.
	Missing func(e *Env) error
	Install string
	// Version says which one it is.
	Version func(ctx context.Context, e *Env) (string, error)
	// Skips: its reader is known to pass messages over, so that they are counted but spoil no figure.
	Skips bool
	// Open sets it up, empty.
	Open func(ctx context.Context, e *Env, s Shape) (System, error)
}

// Shape is what a workload asks of a peer.
type Shape struct {
	// Callers is how many goroutines produce at once: as many connections are theirs.
	Callers int
	// Defaults asks for the consumer as it is without any options; else it has those with which it consumes the most.
	Defaults bool
}

// consumerConns is how many connections each consumer may have.
const consumerConns = 4

// System is a Peer that was set up. It has one topic and one group.
type System interface {
	// Produce stores messages, and returns when they are as durable as the system makes them.
	Produce(ctx context.Context, orders []Order) error
	// Consume gives messages to handle until ctx ends.
	Consume(ctx context.Context, handle func(*Order)) error
	// Close gives all of it up. Consume has returned.
	Close()
}

var peers []Peer

// registerPeer makes a peer known. Call it from init.
func registerPeer(p Peer) { peers = append(peers, p) }

// peerNamed finds a peer.
func peerNamed(name string) (Peer, bool) {
	i := slices.IndexFunc(peers, func(p Peer) bool { return p.Name == name })
	if i < 0 {
		return Peer{}, false
	}
	return peers[i], true
}

// peers are those to run the workload with, Weir first. One that is not installed is left out, with a remark in the result, unless it
// was asked for by name: then it is an error.
func (e *Env) peers(ctx context.Context) ([]Peer, error) {
	var selected []Peer
	for _, name := range append([]string{"weir"}, e.workload.Peers...) {
		p, ok := peerNamed(name)
		if !ok {
			return nil, fmt.Errorf("there is no peer %q", name)
		}
		if name != "weir" && len(e.only) > 0 && !slices.Contains(e.only, name) {
			continue
		}
		if p.Missing != nil {
			if err := p.Missing(e); err != nil {
				err = fmt.Errorf("%s is missing: %w\ninstall it: %s", name, err, p.Install)
				if slices.Contains(e.only, name) {
					return nil, err
				}
				e.Logf("bench: %v\nIt is left out.", err)
				e.Parameter("left out, "+name, "not installed: "+p.Install)
				continue
			}
		}
		if p.Version != nil {
			version, err := p.Version(ctx, e)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			e.version(name, version)
		}
		selected = append(selected, p)
	}
	return selected, nil
}

// moduleVersion gives the version of a Go module that this program was built with.
func moduleVersion(paths ...string) func(context.Context, *Env) (string, error) {
	return func(context.Context, *Env) (string, error) {
		info, ok := debug.ReadBuildInfo()
		if !ok {
			return "", errors.New("this program does not know what it was built from")
		}
		var versions []string
		for _, d := range info.Deps {
			if slices.Contains(paths, d.Path) {
				versions = append(versions, d.Path+" "+d.Version)
			}
		}
		return strings.Join(versions, ", "), nil
	}
}

// turn sets a peer up on its own, lets f use it, and clears it away. Before it the server writes out what earlier turns have left,
// so that nobody pays for another's.
func (e *Env) turn(ctx context.Context, p Peer, s Shape, f func(System) error) error {
	if err := e.Server.Exec(ctx, "postgres", "checkpoint"); err != nil {
		return err
	}
	system, err := p.Open(ctx, e, s)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	err = f(system)
	system.Close()
	e.dropDatabases(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	return nil
}

// measured is a figure that is taken of each peer, and whether Weir's is set in relation to the others'.
type measured struct {
	name, unit string
	ratio      bool
}

// rounds measures peers in turn, again and again, each round beginning with another of them: what the machine does meanwhile falls on
// all alike. one gives the figures of a turn, nil for none; each becomes a series "figure, peer". At the end of a round the relations
// are recorded, as "figure against peer".
func (e *Env) rounds(n int, all []Peer, figures []measured, one func(p Peer) (map[string]float64, error)) error {
	for round := range n {
		of := map[string]map[string]float64{}
		for i := range all {
			p := all[(round+i)%len(all)]
			got, err := one(p)
			if err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
			of[p.Name] = got
			text := ""
			for _, f := range figures {
				if v, ok := got[f.name]; ok {
					text += fmt.Sprintf("  %s %s %s", f.name, short(v), f.unit)
				}
			}
			e.Logf("%s: round %d of %d: %-11s%s", e.result.Workload, round+1, n, p.Name, text)
		}
		for _, f := range figures {
			for _, p := range all {
				if v, ok := of[p.Name][f.name]; ok {
					e.Record(f.name+", "+p.Name, f.unit, v)
				}
			}
		}
		for _, f := range figures {
			for _, p := range all {
				ours, theirs := of["weir"][f.name], of[p.Name][f.name]
				if f.ratio && p.Name != "weir" && ours > 0 && theirs > 0 {
					e.Record(f.name+" against "+p.Name, "x", ours/theirs)
				}
			}
		}
	}
	return nil
}

// account counts what was never delivered, by peer.
type account map[string]int

// sound notes what a turn never delivered. It returns false where that leaves the turn without a figure: the speed of a wrong result
// is none.
func (a account) sound(e *Env, p Peer, t *tally) bool {
	a[p.Name] += t.lost()
	if n := t.lost(); n > 0 {
		e.Record("never delivered, "+p.Name, "%", 100*float64(n)/float64(t.produced.Load()))
	}
	return t.lost() == 0 || p.Skips
}

// close sets the target that Weir has delivered everything, and takes all figures back where it has not.
func (a account) close(e *Env) {
	if a["weir"] > 0 {
		e.discard()
	}
	e.Target("never delivered", "= 0", a["weir"], a["weir"] == 0)
}

// consuming runs a system's consumer while f runs.
func consuming(ctx context.Context, s System, t *tally, f func() error) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	consumed := make(chan error, 1)
	go func() { consumed <- s.Consume(running, t.handled) }()
	err := f()
	stop()
	if e := <-consumed; err == nil && ctx.Err() == nil && !errors.Is(e, context.Canceled) {
		err = e
	}
	return err
}

// patience is how long nothing may be delivered until what is missing counts as lost.
func (p Peer) patience() time.Duration {
	if p.Skips {
		return 500 * time.Millisecond // nothing ever comes
	}
	return 15 * time.Second
}

// pool opens a pool of so many connections, none of which waits to be made when it is first used.
func pool(ctx context.Context, dsn string, conns int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	config.MinConns = int32(conns)
	return pgxpool.NewWithConfig(ctx, config)
}
