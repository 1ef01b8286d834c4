package torture

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// progress tells how a run goes.
type progress struct {
	t     *torture
	began time.Time

	mu    sync.Mutex
	state string
	ended chan struct{}
}

func newProgress(t *torture) *progress {
	return &progress{t: t, began: time.Now(), state: "torturing", ended: make(chan struct{})}
}

func (p *progress) phase(name string) {
	p.mu.Lock()
	p.state = name
	p.mu.Unlock()
	p.tell()
}

func (p *progress) run(ctx context.Context) {
	defer close(p.ended)
	every := 10 * time.Second
	if p.t.o.Live {
		every = 500 * time.Millisecond
	}
	for {
		pause(ctx, every)
		if ctx.Err() != nil {
			return
		}
		p.tell()
	}
}

func (p *progress) tell() {
	t := p.t
	var sum tally
	for _, s := range t.slots {
		sum.add(s.sum())
	}
	t.mu.Lock()
	faults, lag := len(t.happened), int64(0)
	if n := len(t.samples); n > 0 {
		lag = slices.Max(t.samples[n-1].lag[:])
	}
	t.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	line := fmt.Sprintf("%s %4.0f s: %s messages, %s faults, lag %s", p.state, time.Since(p.began).Seconds(),
		number(int(sum.Produced)), number(faults), number(int(lag)))
	if t.o.Live {
		fmt.Fprintf(t.o.Out, "\r\x1b[K%s", line)
	} else {
		fmt.Fprintln(t.o.Out, line)
	}
}

// done ends the line; run has ended by then, or is about to.
func (p *progress) done() {
	<-p.ended
	if p.t.o.Live {
		fmt.Fprint(p.t.o.Out, "\r\x1b[K")
	}
}
