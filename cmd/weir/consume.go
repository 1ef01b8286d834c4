package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

// errorTail is how much of what a program writes on standard error is kept as the error of a message.
const errorTail = 2000

type consumeOptions struct {
	program     string
	create      bool
	start       string
	max         int64
	untilIdle   bool
	concurrency int
	timeout     time.Duration
	stopTimeout time.Duration
}

func consumeCommand(g *global) *cobra.Command {
	var o consumeOptions
	cmd := &cobra.Command{
		Use:   "consume TOPIC GROUP",
		Short: "Hand the messages of a group to standard output, or to a program",
		Long: `Takes the messages of a group. Each is printed as a JSON document a line, with id, topic, group, attempt, key, headers,
produced_at and payload, and is acknowledged when the line has been written.

With --exec a program is run for each message instead, by sh -c. It gets the payload on its standard input, and WEIR_ID,
WEIR_KEY, WEIR_TOPIC, WEIR_GROUP and WEIR_ATTEMPT in its environment. When it ends with exit code 0 the message is handled.
Otherwise the attempt has failed, with the end of its standard error as the error: the message is tried again later, and
is dead after the group's attempts.

It goes on until it is interrupted; then it takes no more, waits for running programs (--stop-timeout), and gives back what
it has not handled. A message can be handed out more than once, after a crash for example. Any number of these can run for
the same group: they share its messages.

` + positionHelp + `

` + payloadHelp,
		Example: `  weir consume events audit --create
  weir consume events audit --until-idle > new.ndjson
  weir consume events mail --exec './send-mail --to "$WEIR_KEY"' --concurrency 8`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.max < 0:
				return usageOf(cmd, "--max is %d, it must not be negative", o.max)
			case o.timeout < 0 || o.stopTimeout < 0:
				return usageOf(cmd, "--timeout and --stop-timeout must not be negative")
			case o.concurrency < 1:
				return usageOf(cmd, "--concurrency is %d, it must be at least 1", o.concurrency)
			case cmd.Flags().Changed("exec") && o.program == "":
				return usageOf(cmd, "--exec is empty, it must be a command")
			case cmd.Flags().Changed("start") && !o.create:
				return usageOf(cmd, `--start is for a new group: give --create as well, or use "weir group seek"`)
			}
			start, err := parsePosition(o.start)
			if err != nil {
				return err
			}
			if o.program == "" && standardClosed(g.stdout) {
				return &outputError{errors.New("it is closed; give it a place to go, or use --exec")}
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if o.create {
				if err := client.CreateGroup(cmd.Context(), args[0], args[1], &weir.GroupOptions{Start: start}); err != nil {
					return err
				}
			}
			k := &consumption{g: g, client: client, format: t.Format, o: o, gate: newGate(o.max)}
			return k.run(cmd.Context(), args[0], args[1])
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.program, "exec", "", "run this command for each message, by sh -c")
	flags.BoolVar(&o.create, "create", false, "create the group when it does not exist")
	flags.StringVar(&o.start, "start", "beginning", "with --create, where a new group begins: a position")
	flags.Int64VarP(&o.max, "max", "n", 0, "end after so many messages (default: no limit)")
	flags.BoolVar(&o.untilIdle, "until-idle", false, "end when the group has nothing left: no message to claim, in hand, or between two attempts")
	flags.IntVar(&o.concurrency, "concurrency", 1, "how many messages are handled at once; with more than one, not in the order of their ids")
	flags.DurationVar(&o.timeout, "timeout", time.Minute, "how long a program may take, 0 for any time")
	flags.DurationVar(&o.stopTimeout, "stop-timeout", 10*time.Second, "how long running programs may take to end after an interrupt")
	complete(cmd, "start", "beginning", "head")
	return cmd
}

// consumption is one run of "weir consume".
type consumption struct {
	g      *global
	client *weir.Client
	format weir.Format
	o      consumeOptions
	gate   *gate
	output sync.Mutex
	broken error // standard output cannot be written any more
}

func (k *consumption) run(ctx context.Context, topic, group string) error {
	handle := k.write
	if k.o.program != "" {
		handle = k.execute
	}
	o := &weir.ConsumerOptions{
		Concurrency: k.o.concurrency,
		// Standard output may be read slowly, which is not the message's fault. Programs have a limit of their own.
		HandlerTimeout: -1,
		// The gate has waited by then.
		StopTimeout: 50 * time.Millisecond,
	}
	if k.o.max > 0 && k.o.max < 200 {
		o.Prefetch = int(k.o.max)
	}
	consumer, err := k.client.NewConsumer(topic, group, weir.Handle(func(ctx context.Context, m *weir.Received[[]byte]) error {
		if !k.gate.enter() {
			<-ctx.Done() // it is stopping: the message is released, as if it had never been handed out
			return context.Cause(ctx)
		}
		err := handle(ctx, m)
		k.gate.leave()
		var output *outputError
		if errors.As(err, &output) {
			// That is not the message's fault: end, and leave it to others.
			k.gate.close()
			<-ctx.Done()
		}
		return err
	}), o)
	if err != nil {
		return err
	}
	// A signal does not end Run at once: the gate is shut first, and what has passed it may finish.
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(running) }()
	idle := make(chan error, 1)
	if k.o.untilIdle {
		go func() { idle <- k.watch(running, consumer, topic, group) }()
	}
	var failure error
	select {
	case failure = <-ended:
		ended <- nil
	case <-ctx.Done():
	case <-k.gate.shut:
	case failure = <-idle:
	}
	patience := k.o.stopTimeout
	if k.o.program == "" {
		patience = min(patience, time.Second) // nothing can be done for a line that nobody reads
	}
	k.gate.close()
	k.gate.wait(ctx, patience)
	stop()
	if err := <-ended; failure == nil {
		failure = err
	}
	k.output.Lock()
	defer k.output.Unlock()
	if k.broken != nil {
		return k.broken
	}
	if k.o.program != "" {
		stats := consumer.Stats()
		k.g.note("%s handled, %s failed", count(stats.Handled, "message"), count(stats.Failed, "attempt"))
	}
	return failure
}

// watch returns when the group has nothing left to do.
func (k *consumption) watch(ctx context.Context, consumer *weir.Consumer, topic, group string) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
		if s := consumer.Stats(); s.Buffered > 0 || s.Executing > 0 {
			continue
		}
		state, err := k.client.Group(ctx, topic, group)
		if err != nil {
			if ctx.Err() != nil || weir.CanRetry(err) && !errors.Is(err, weir.ErrGroupNotFound) {
				continue // the consumer says what is wrong
			}
			return err
		}
		if state.Claimed >= state.Head && state.Leases == 0 && state.Retrying == 0 {
			return nil
		}
	}
}

// write prints a message. It is acknowledged after that, so the line must have been written by then.
func (k *consumption) write(_ context.Context, m *weir.Received[[]byte]) error {
	j := asJSON(m)
	j.Topic, j.Group, j.Attempt = m.Topic, m.Group, m.Attempt
	line, err := withPayload(j, k.format, m.Raw)
	if err != nil {
		return err
	}
	k.output.Lock()
	defer k.output.Unlock()
	if k.broken == nil {
		if _, k.broken = k.g.out.Write(line); k.broken == nil {
			k.broken = k.g.out.Flush()
		}
	}
	return k.broken
}

// execute runs the program for a message.
func (k *consumption) execute(ctx context.Context, m *weir.Received[[]byte]) error {
	if k.o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, k.o.timeout, weir.ErrHandlerTimeout)
		defer cancel()
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", k.o.program)
	cmd.Env = append(os.Environ(),
		"WEIR_ID="+strconv.FormatInt(m.ID, 10),
		"WEIR_KEY="+m.Key,
		"WEIR_TOPIC="+m.Topic,
		"WEIR_GROUP="+m.Group,
		"WEIR_ATTEMPT="+strconv.Itoa(m.Attempt))
	cmd.Stdin = bytes.NewReader(m.Raw)
	cmd.Stdout = k.g.stdout
	errs := &tailWriter{through: k.g.err}
	cmd.Stderr = errs
	cmd.WaitDelay = 500 * time.Millisecond
	ownGroup(cmd)
	err := cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the program has succeeded, and left something in the background that keeps its standard error
	}
	if ctx.Err() != nil && err != nil {
		endGroup(cmd)
		if cause := context.Cause(ctx); errors.Is(cause, weir.ErrHandlerTimeout) {
			err = fmt.Errorf("%w of %v", cause, k.o.timeout)
		}
	}
	if err == nil {
		return nil
	}
	if text := bytes.TrimSpace(errs.tail); len(text) > 0 {
		return fmt.Errorf("%w: %s", err, bytes.ToValidUTF8(text, []byte("\ufffd")))
	}
	return err
}

// tailWriter keeps the end of what is written, and passes it on.
type tailWriter struct {
	through io.Writer
	tail    []byte
}

func (t *tailWriter) Write(p []byte) (int, error) {
	t.tail = append(t.tail, p...)
	if n := len(t.tail); n > errorTail {
		t.tail = append(t.tail[:0], t.tail[n-errorTail:]...)
	}
	_, _ = t.through.Write(p) // a standard error that nobody reads is no failure of the program
	return len(p), nil
}

// gate lets handlers in until it is shut, and knows when all of them have left.
type gate struct {
	shut    chan struct{} // closed once it is shut
	drained chan struct{} // closed once nobody is inside any more, and nobody will be

	mu      sync.Mutex
	most    int64 // 0: without limit
	entered int64
	inside  int
	isShut  bool
}

func newGate(most int64) *gate {
	return &gate{most: most, shut: make(chan struct{}), drained: make(chan struct{})}
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.isShut {
		return false
	}
	g.inside++
	if g.entered++; g.entered == g.most {
		g.isShut = true
		close(g.shut)
	}
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside--; g.isShut && g.inside == 0 {
		close(g.drained)
	}
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.isShut {
		return
	}
	g.isShut = true
	close(g.shut)
	if g.inside == 0 {
		close(g.drained)
	}
}

// wait waits until all have left, but no longer than patience after ctx has ended.
func (g *gate) wait(ctx context.Context, patience time.Duration) {
	select {
	case <-g.drained:
		return
	case <-ctx.Done():
	}
	select {
	case <-g.drained:
	case <-time.After(patience):
	}
}
