package demo

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weirhq/weir"
)

// state is what the picture shows, besides what the database says.
type state struct {
	d *demo

	mu      sync.Mutex
	stage   string
	events  []event
	holds   map[int]time.Time // producer -> since when its transaction is held open
	longest time.Duration
	count   int
	kills   []Kill
}

type event struct {
	at   time.Duration
	text string
}

func (s *state) phase(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stage = name
}

func (s *state) event(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, event{time.Since(s.d.began), fmt.Sprintf(format, args...)})
}

// hold notes that a producer holds its transaction open, or with a zero time that it no longer does.
func (s *state) hold(producer int, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds == nil {
		s.holds = map[int]time.Time{}
	}
	s.holds[producer] = since
	if since.IsZero() {
		delete(s.holds, producer)
	}
}

func (s *state) held(producer int, d time.Duration, overtook int64, rolledBack bool) {
	fate := "held open"
	if rolledBack {
		fate = "rolled back after"
	}
	s.event("transaction of producer %d %s %.1f s, overtaken by %s", producer, fate, d.Seconds(), number(overtook))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count++
	s.longest = max(s.longest, d)
}

func (s *state) killed(k Kill) (index int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kills = append(s.kills, k)
	return len(s.kills) - 1
}

func (s *state) tookOver(index int, after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kills[index].TakenOver = true
	s.kills[index].TakenOverAfter = seconds(after)
}

// lines makes an event of each line that is written to it.
type lines struct {
	s      *state
	prefix string
	rest   []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	for {
		line, rest, found := bytes.Cut(l.rest, []byte("\n"))
		if !found {
			return len(p), nil
		}
		l.rest = rest
		if text := strings.TrimSpace(string(line)); text != "" {
			l.s.event("%s%s", l.prefix, text)
		}
	}
}

// frame is one picture.
type frame struct {
	title   string
	stage   string
	at      time.Duration // since the run began
	left    float64       // of the time to produce, 1 to 0
	head    int64
	settled int64
	rate    float64
	hold    string
	window  int64 // ids that the bars show
	groups  []groupFrame
	naive   groupFrame
	workers []worker
	events  []event
}

type groupFrame struct {
	name     string
	position int64
	lag      int64
	skipped  int64
}

type worker struct {
	pid   int
	alive bool
}

// watch looks at the database a few times a second, records what it sees of the topic, and shows it; once more when ctx has
// ended.
func (d *demo) watch(ctx context.Context, show *show) {
	type sample struct {
		at        time.Time
		committed int64
		lag       int64
	}
	var (
		samples []sample
		f       frame
	)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for ended := false; ; {
		began := d.rec.Now()
		t, err := d.c.Topic(d.life, d.topic)
		var list []weir.Group
		if err == nil {
			d.rec.SettledSince(began, d.topic, t.Settled)
			list, err = d.c.Groups(d.life, d.topic)
		}
		if err == nil {
			f.head, f.settled = t.Head, t.Settled
			f.groups = f.groups[:0]
			for _, g := range groups {
				i := slices.IndexFunc(list, func(l weir.Group) bool { return l.Name == g.name })
				if i < 0 {
					continue
				}
				f.head, f.settled = max(f.head, list[i].Head), max(f.settled, list[i].Settled)
				f.groups = append(f.groups, groupFrame{name: g.name, position: list[i].Committed, lag: list[i].Lag})
			}
			f.naive = groupFrame{name: "naive", position: d.naive.at(), skipped: d.naive.count(d.life, d, f.settled)}
			f.head = max(f.head, f.naive.position)
			f.naive.lag = f.head - f.naive.position
		}
		now := time.Now()
		s := sample{now, d.committed.Load(), f.head - f.settled}
		for _, g := range f.groups {
			s.lag = max(s.lag, g.lag)
		}
		samples = append(samples, s)
		// The scale follows the largest lag of the last 5 s, in steps, so that it seldom jumps.
		for len(samples) > 1 && now.Sub(samples[0].at) > 5*time.Second {
			samples = samples[1:]
		}
		peak := int64(0)
		for _, s := range samples {
			peak = max(peak, s.lag)
		}
		f.window = scale(max(peak+peak/4, int64(d.o.Rate), 100))
		recent := samples[max(0, len(samples)-10)]
		if span := now.Sub(recent.at).Seconds(); span > 0 {
			f.rate = float64(s.committed-recent.committed) / span
		}
		d.fill(&f, now)
		show.frame(&f)
		if ended {
			return
		}
		select {
		case <-ctx.Done():
			ended = true
		case <-tick.C:
		}
	}
}

// fill adds to a frame what this process knows.
func (d *demo) fill(f *frame, now time.Time) {
	s := &d.state
	s.mu.Lock()
	defer s.mu.Unlock()
	f.title = fmt.Sprintf("%s, %s, %s/s, seed %d", d.server, plural(d.o.Producers, "producer", "producers"), number(d.o.Rate), d.o.Seed)
	f.stage = s.stage
	f.at = now.Sub(d.began)
	f.left = max(0, 1-now.Sub(d.began).Seconds()/d.o.For.Seconds())
	f.hold = ""
	oldest := now
	for n, since := range s.holds {
		if since.Before(oldest) {
			oldest = since
			f.hold = fmt.Sprintf("producer %d (%.1f s)", n, now.Sub(since).Seconds())
		}
	}
	f.workers = f.workers[:0]
	for _, c := range d.children {
		f.workers = append(f.workers, worker{c.pid, c.alive()})
	}
	f.events = s.events
}

// scale is the least of 1, 2 or 5 times a power of ten that is not below n.
func scale(n int64) int64 {
	for step := int64(1); ; step *= 10 {
		for _, m := range []int64{1, 2, 5} {
			if m*step >= n {
				return m * step
			}
		}
	}
}
