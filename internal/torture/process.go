package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// slot is the place of one process, which is started anew when it was killed.
type slot struct {
	t     *torture
	group int // -1 for a producer
	proxy *proxy

	mu       sync.Mutex
	cmd      *exec.Cmd
	in       io.WriteCloser
	proc     int64
	killed   bool
	stopping bool
	ended    chan struct{} // of the present process
	tally    tally
	before   tally // of those that have ended
}

func (s *slot) role() string {
	if s.group < 0 {
		return "producer"
	}
	return groups[s.group].name
}

// run keeps a process there until stop is called.
func (s *slot) run(rng *rand.Rand) {
	for {
		if err := s.start(rng.Uint64()); err != nil {
			s.t.odd("start a process of %s: %v", s.role(), err)
			return
		}
		<-s.ended
		s.mu.Lock()
		killed, stopping := s.killed, s.stopping
		s.mu.Unlock()
		if stopping {
			return
		}
		if killed {
			time.Sleep(time.Duration(rng.Int64N(int64(700 * time.Millisecond))))
		} else {
			time.Sleep(500 * time.Millisecond)
		}
		s.mu.Lock()
		stopping = s.stopping
		s.mu.Unlock()
		if stopping {
			return
		}
	}
}

func (s *slot) start(seed uint64) error {
	t := s.t
	sp := spec{
		DSN: t.dsn, Schema: t.o.Schema, Folder: t.folder, Base: t.base, Proc: t.nextProc(), Seed: seed, Era: t.era, Group: s.group,
		Rate: t.rate(),
	}
	if s.proxy != nil {
		sp.Proxy = s.proxy.address()
	}
	first, err := json.Marshal(sp)
	if err != nil {
		return err
	}
	cmd, err := t.o.Child()
	if err != nil {
		return err
	}
	apart(cmd)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var said strings.Builder
	cmd.Stderr = &limited{w: &said, left: 4000}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	s.mu.Lock()
	s.cmd, s.in, s.proc, s.killed, s.ended = cmd, in, sp.Proc, false, ended
	s.before.add(s.tally)
	s.tally = tally{}
	stopping := s.stopping
	s.mu.Unlock()
	if _, err := in.Write(append(first, '\n')); err == nil && stopping {
		_ = in.Close()
	}
	s.t.tasks.Go(func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var now tally
			if json.Unmarshal(lines.Bytes(), &now) == nil {
				s.mu.Lock()
				s.tally = now
				s.mu.Unlock()
			}
		}
		err := cmd.Wait()
		s.mu.Lock()
		if !s.killed && (err != nil || !s.stopping) {
			s.t.odd("process %d of %s ended by itself: %v %s", sp.Proc, s.role(), err, strings.TrimSpace(said.String()))
		}
		s.mu.Unlock()
		close(ended)
	})
	return nil
}

// kill ends the present process without a warning. It reports which one it was, 0 for none.
func (s *slot) kill() (proc int64) {
	s.mu.Lock()
	if s.cmd == nil || s.killed || s.stopping || finished(s.ended) {
		s.mu.Unlock()
		return 0
	}
	s.killed = true
	_ = s.cmd.Process.Kill()
	proc, ended := s.proc, s.ended
	s.mu.Unlock()
	<-ended
	return proc
}

// suspend stops the present process for a while.
func (s *slot) suspend(d time.Duration) (proc int64) {
	s.mu.Lock()
	if s.cmd == nil || s.killed || s.stopping || finished(s.ended) {
		s.mu.Unlock()
		return 0
	}
	pid, proc := s.cmd.Process.Pid, s.proc
	err := stopProcess(pid)
	s.mu.Unlock()
	if err != nil {
		return 0
	}
	time.Sleep(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == proc && !finished(s.ended) {
		_ = resumeProcess(pid)
	}
	return proc
}

// stop asks the process to stop and waits for it.
func (s *slot) stop(within time.Duration) {
	s.mu.Lock()
	s.stopping = true
	in, ended, cmd := s.in, s.ended, s.cmd
	s.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = in.Close()
	select {
	case <-ended:
	case <-time.After(within):
		s.t.odd("process %d of %s did not stop within %v", s.proc, s.role(), within)
		s.mu.Lock()
		s.killed = true
		_ = cmd.Process.Kill()
		s.mu.Unlock()
		<-ended
	}
}

// say writes a line to the process.
func (s *slot) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.in != nil && !s.stopping && !finished(s.ended) {
		_, _ = fmt.Fprintf(s.in, format+"\n", args...) // it may have just been killed
	}
}

func (s *slot) sum() tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.before
	all.add(s.tally)
	return all
}

func (t *tally) add(o tally) {
	t.Produced += o.Produced
	t.Handled += o.Handled
	t.Strays += o.Strays
	t.Errors += o.Errors
	if o.Last != "" {
		t.Last = o.Last
	}
}

func finished(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// limited writes so many bytes and drops the rest.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	if _, err := l.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// within bounds a call to the server.
func within(d time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return f(ctx)
}
