package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync/atomic"
	"time"
)

// child is a consumer's process.
type child struct {
	cmd   *exec.Cmd
	pid   int
	name  string
	group string
	in    io.WriteCloser
	ended chan struct{} // closed when it was waited for
	err   error

	killed, stopped atomic.Bool
}

func (c *child) alive() bool {
	select {
	case <-c.ended:
		return false
	default:
		return true
	}
}

// startChildren starts the processes of the groups that have some.
func (d *demo) startChildren() error {
	if d.o.Consumer == nil {
		return errors.New("no command for the processes of consumers")
	}
	for _, g := range groups {
		for i := 0; g.processes && i < processes; i++ {
			if err := d.startChild(g, int32(10+len(d.children))); err != nil {
				return fmt.Errorf("start a consumer's process: %w", err)
			}
		}
	}
	return nil
}

func (d *demo) startChild(g group, proc int32) error {
	spec, err := json.Marshal(role{
		DSN: d.o.DSN, Schema: d.o.Schema, Topic: d.topic, Group: g.name, Folder: d.folder, Base: d.rec.Base(), Proc: proc,
		Lease: d.o.lease(), Concurrency: max(concurrency(d.o.Rate, handlerTime)/processes, 2),
	})
	if err != nil {
		return err
	}
	cmd, err := d.o.Consumer()
	if err != nil {
		return err
	}
	c := &child{cmd: cmd, group: g.name, ended: make(chan struct{})}
	// Its end tells the process to stop. It also comes when this process dies.
	if c.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	cmd.Stderr = &lines{s: &d.state, prefix: fmt.Sprintf("a consumer of %s: ", g.name)}
	apart(cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	c.pid = cmd.Process.Pid
	c.name = consumerName(g.name, c.pid)
	d.state.mu.Lock()
	d.children = append(d.children, c)
	d.state.mu.Unlock()
	d.tasks.Go(func() {
		c.err = cmd.Wait()
		close(c.ended)
		if !c.killed.Load() && !c.stopped.Load() {
			d.state.event("consumer %d of %s ended by itself: %v", c.pid, g.name, c.err)
		}
	})
	_, err = c.in.Write(spec)
	return err
}

// stopChildren ends the processes that are left and waits for them.
func (d *demo) stopChildren() {
	for _, c := range d.children {
		c.stopped.Store(true)
		_ = c.in.Close() // fails for those that have ended
	}
	limit := time.After(15 * time.Second)
	for _, c := range d.children {
		select {
		case <-c.ended:
		case <-limit:
			_ = c.cmd.Process.Kill()
			<-c.ended
		}
	}
}

// kill kills a consumer's process while it is at work on messages, and watches the others take them over.
func (d *demo) kill(ctx context.Context) {
	pause(ctx, d.o.For*2/5)
	enough, impatient := int64(10), time.Now().Add(d.o.For/10)
	for ctx.Err() == nil {
		var alive []string
		by := map[string]*child{}
		for _, c := range d.children {
			if c.alive() {
				alive = append(alive, c.name)
				by[c.name] = c
			}
		}
		if len(alive) < 2 {
			return
		}
		held, err := d.holding(ctx, alive)
		if err != nil {
			pause(ctx, 100*time.Millisecond)
			continue
		}
		if time.Now().After(impatient) {
			enough = 1
		}
		var victim *child
		most := enough - 1
		for name, n := range held {
			if n > most {
				victim, most = by[name], n
			}
		}
		if victim == nil {
			pause(ctx, 5*time.Millisecond)
			continue
		}
		pause(ctx, 3*handlerTime) // into the middle of its work
		if d.killChild(victim) {
			return
		}
	}
}

// holding says how many messages consumers hold.
func (d *demo) holding(ctx context.Context, consumers []string) (map[string]int64, error) {
	rows, err := d.pool.Query(ctx, d.text("held"), d.topic, consumers)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	held := map[string]int64{}
	for rows.Next() {
		var name string
		var n int64
		if err := rows.Scan(&name, &n); err != nil {
			return nil, err
		}
		held[name] = n
	}
	return held, rows.Err()
}

// killChild reports whether the process left messages behind.
func (d *demo) killChild(c *child) bool {
	c.killed.Store(true)
	if err := c.cmd.Process.Kill(); err != nil {
		d.state.event("cannot kill consumer %d: %v", c.pid, err)
		return false
	}
	<-c.ended
	died := time.Now()
	ctx, cancel := context.WithTimeout(d.life, drainLimit)
	defer cancel()
	// What the process had sent before it died the server still does.
	for until := died.Add(time.Second); time.Now().Before(until); pause(ctx, 5*time.Millisecond) {
		var sessions int
		if err := d.pool.QueryRow(ctx, d.text("sessions"), c.name).Scan(&sessions); err == nil && sessions == 0 {
			break
		}
	}
	held, err := d.holding(ctx, []string{c.name})
	if err != nil {
		d.state.event("consumer %d of %s killed (SIGKILL)", c.pid, c.group)
		return true
	}
	left := held[c.name]
	if left == 0 {
		d.state.killed(Kill{PID: c.pid, Group: c.group})
		d.state.event("consumer %d of %s killed (SIGKILL) while it held nothing", c.pid, c.group)
		return false
	}
	kill := d.state.killed(Kill{PID: c.pid, Group: c.group, Held: int(left)})
	d.state.event("consumer %d of %s killed (SIGKILL) while it held %s", c.pid, c.group, plural(left, "message", "messages"))
	for {
		if held, err := d.holding(ctx, []string{c.name}); err == nil && held[c.name] == 0 {
			after := time.Since(died)
			d.state.tookOver(kill, after)
			d.state.event("its %s taken over, %.1f s after its death", plural(left, "message was", "messages were"), after.Seconds())
			return true
		}
		if pause(ctx, 10*time.Millisecond); ctx.Err() != nil {
			return true
		}
	}
}
