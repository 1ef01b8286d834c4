package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

const (
	// batchBytes is how many bytes of payload a batch has at the most, but for a single larger message.
	batchBytes = 8 << 20
	// inputPause is how long the input of a pipe or a terminal may be silent before what has come is stored.
	inputPause = 200 * time.Millisecond
)

type produceOptions struct {
	lines    bool
	key      string
	keyField string
	keySet   bool
	headers  []string
	batch    int
	atomic   bool

	deliverAt      string
	delay          time.Duration
	priority       int
	timeout        time.Duration
	idempotencyKey string
	// the field of each document that holds its idempotency key
	idempotencyField string
}

func produceCommand(g *global) *cobra.Command {
	var o produceOptions
	cmd := &cobra.Command{
		Use:   "produce TOPIC [FILE...]",
		Short: "Store messages from files or standard input",
		Long: fmt.Sprintf(`Stores one message for each line of the files, or of standard input: a line is a JSON document, which is kept byte for
byte; blank lines are left out. With --lines each line, a blank one too, is stored as a JSON string. On a topic of format
bytes each line is stored as it is.

Messages are stored in batches, each in a transaction of its own: all of a batch or nothing. A batch has --batch messages,
or fewer when they exceed %d MiB, or when a pipe or terminal has had nothing more for %v. With --atomic all of the
input is one transaction.

--deliver-at, --delay, --priority and --timeout go for every message. A message with an idempotency key that the topic
remembers is a duplicate, and is left out: with --idempotency-field the same input can be produced again.

At the first line that is refused, it ends: the error says which line it was and how many messages were stored, and with
which line to go on. Nothing of that line's batch was stored.`, batchBytes>>20, inputPause),
		Example: `  weir produce events < events.ndjson
  weir produce events one.ndjson two.ndjson --key-field customer.id
  journalctl -f -o json | weir produce journal --header host=$(hostname)
  weir produce notes --lines --key todo < notes.txt
  weir produce events --atomic < events.ndjson
  weir produce payments --idempotency-field payment.id < payments.ndjson
  echo '{"remind":7}' | weir produce jobs --deliver-at 2026-01-31T12:00:00Z --priority 5`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.batch < 1 || o.batch > 10_000 {
				return usageOf(cmd, "--batch is %d, it must be from 1 to 10000", o.batch)
			}
			o.keySet = cmd.Flags().Changed("key")
			if cmd.Flags().Changed("key-field") && slices.Contains(strings.Split(o.keyField, "."), "") {
				return usageOf(cmd, "--key-field is %q, it must be the name of a field, or several with dots between them", o.keyField)
			}
			p := &producer{g: g, topic: args[0], o: o}
			if err := p.common(cmd); err != nil {
				return err
			}
			for _, h := range o.headers {
				name, value, ok := strings.Cut(h, "=")
				if !ok || name == "" {
					return usageOf(cmd, "--header is %q, it must be name=value", h)
				}
				if p.headers == nil {
					p.headers = map[string]string{}
				}
				p.headers[name] = value
			}
			in, err := newInput(args[1:], g.in)
			if err != nil {
				return err
			}
			if p.client, err = g.open(cmd.Context()); err != nil {
				return err
			}
			defer p.client.Close()
			t, err := p.client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			p.format = t.Format
			if o.lines && o.keyField != "" && p.format != weir.Bytes {
				return usageOf(cmd, "--lines makes strings, which have no field for --key-field: use --key")
			}
			if o.lines && o.idempotencyField != "" && p.format != weir.Bytes {
				return usageOf(cmd, "--lines makes strings, which have no field for --idempotency-field")
			}
			p.startBar(in.size)
			err = p.run(cmd.Context(), in)
			p.stopBar()
			if g.json() {
				p.result.Topic = p.topic
				if printed := g.print(p.result, nil); err == nil {
					err = printed
				}
			} else if err == nil {
				ids := ""
				if p.result.First > 0 {
					ids = fmt.Sprintf(", ids %d to %d", p.result.First, p.result.Last)
				}
				if p.result.Duplicates > 0 {
					ids += fmt.Sprintf("; left out %s", count(p.result.Duplicates, "duplicate"))
				}
				err = g.done(nil, "stored %s in %s%s", count(p.result.Stored, "message"), p.topic, ids)
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.lines, "lines", false, "store each line as a JSON string (on a bytes topic: as it is)")
	flags.StringVar(&o.key, "key", "", "the key of every message; with --key-field that of documents without the field")
	flags.StringVar(&o.keyField, "key-field", "", "the field of each document that holds its key; dots lead into objects")
	flags.StringArrayVar(&o.headers, "header", nil, "a header of every message, name=value; may be repeated")
	flags.StringVar(&o.deliverAt, "deliver-at", "", "when every message is handed out, such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00+01:00")
	flags.DurationVar(&o.delay, "delay", 0, "how long after it is stored every message is handed out, such as 90s or 24h")
	flags.IntVar(&o.priority, "priority", 0, "the priority of every message, -10 to 10; queue groups hand out higher ones first")
	flags.DurationVar(&o.timeout, "timeout", 0, "how long a handler may take for a message, 1ms to 168h")
	flags.StringVar(&o.idempotencyKey, "idempotency-key", "", "the idempotency key of the message, of which the input has one")
	flags.StringVar(&o.idempotencyField, "idempotency-field", "", "the field of each document that holds its idempotency key; dots lead into objects")
	flags.IntVar(&o.batch, "batch", 1000, "messages in a transaction, 1 to 10000")
	flags.BoolVar(&o.atomic, "atomic", false, "store all of the input in one transaction, or nothing")
	return cmd
}

// producer stores lines.
type producer struct {
	g       *global
	client  *weir.Client
	topic   string
	format  weir.Format
	o       produceOptions
	headers map[string]string
	// message has what every message has
	message weir.Message

	// batch is what was read and is not stored yet, and the lines it came from.
	batch []weir.Message
	lines []line
	size  int

	conn *pgx.Conn // with --atomic, and to find which message was refused
	tx   pgx.Tx    // with --atomic
	open int64     // messages stored in tx

	messages int // that were read

	result produceResult

	bar   *progressbar.ProgressBar
	began time.Time
}

type produceResult struct {
	Topic  string `json:"topic"`
	Stored int64  `json:"stored"`
	First  int64  `json:"first_id,omitempty"` // not with --atomic
	Last   int64  `json:"last_id,omitempty"`
	// Duplicates is how many messages were left out, because their idempotency keys were there already.
	Duplicates int64  `json:"duplicates,omitempty"`
	Refused    string `json:"refused,omitempty"` // file:line
	Resume     string `json:"resume,omitempty"`  // file:line to go on with after an error
	// Unknown is how many messages may or may not be stored, because the connection was lost at the wrong moment.
	Unknown int64 `json:"unknown,omitempty"`
}

// common checks what goes for every message.
func (p *producer) common(cmd *cobra.Command) error {
	o, flags := &p.o, cmd.Flags()
	if o.deliverAt != "" {
		if flags.Changed("delay") {
			return usageOf(cmd, "--deliver-at and --delay are both given: give one of them")
		}
		at, err := time.Parse(time.RFC3339, o.deliverAt)
		if err != nil {
			return usageOf(cmd, "--deliver-at is %q, it must be a time with its zone, such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00+01:00", o.deliverAt)
		}
		p.message.DeliverAt = at
	}
	if o.delay < 0 || o.delay > 3650*24*time.Hour {
		return usageOf(cmd, "--delay is %v, it must be from 0s to 87600h", o.delay)
	}
	if o.priority < -10 || o.priority > 10 {
		return usageOf(cmd, "--priority is %d, it must be from -10 to 10", o.priority)
	}
	if flags.Changed("timeout") && (o.timeout < time.Millisecond || o.timeout > 7*24*time.Hour) {
		return usageOf(cmd, "--timeout is %v, it must be from 1ms to 168h", o.timeout)
	}
	if flags.Changed("idempotency-key") {
		if n := utf8.RuneCountInString(o.idempotencyKey); n < 1 || n > 200 {
			return usageOf(cmd, "--idempotency-key has %d characters, it must have 1 to 200", n)
		}
		if flags.Changed("idempotency-field") {
			return usageOf(cmd, "--idempotency-key and --idempotency-field are both given: give one of them")
		}
	}
	if flags.Changed("idempotency-field") && slices.Contains(strings.Split(o.idempotencyField, "."), "") {
		return usageOf(cmd, "--idempotency-field is %q, it must be the name of a field, or several with dots between them", o.idempotencyField)
	}
	p.message.Delay, p.message.Priority, p.message.Timeout, p.message.IdempotencyKey = o.delay, o.priority, o.timeout, o.idempotencyKey
	return nil
}

func (p *producer) run(ctx context.Context, in *input) error {
	// A batch that was sent is waited for when a signal comes, so that what was stored is known.
	storing := context.WithoutCancel(ctx)
	defer func() {
		if p.conn != nil {
			closing, cancel := context.WithTimeout(storing, time.Second)
			defer cancel()
			_ = p.conn.Close(closing) // rolls back
		}
	}()
	if p.o.atomic {
		if err := p.connect(ctx); err != nil {
			return err
		}
		var err error
		if p.tx, err = p.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}); err != nil {
			return err
		}
	}
	reading, stop := context.WithCancel(ctx)
	defer stop()
	lines := make(chan line, 1024)
	go in.lines(reading, lines)
	pause := time.NewTimer(time.Hour)
	defer pause.Stop()
	for {
		var silent <-chan time.Time
		if in.size < 0 && len(p.batch) > 0 {
			pause.Reset(inputPause)
			silent = pause.C
		}
		select {
		case <-ctx.Done():
			return p.failed(errors.New("interrupted"))
		case <-silent:
			if err := p.store(storing); err != nil {
				return err
			}
		case l, more := <-lines:
			if !more {
				if ctx.Err() != nil {
					return p.failed(errors.New("interrupted"))
				}
				if err := p.store(storing); err != nil {
					return err
				}
				return p.commit(storing)
			}
			if err := p.add(storing, l); err != nil {
				return err
			}
		}
	}
}

// add takes a line, and stores the batch when it is full.
func (p *producer) add(ctx context.Context, l line) error {
	if l.err != nil {
		p.lines = append(p.lines, l)
		return p.failed(fmt.Errorf("%s: %w", l, l.err))
	}
	asIs := p.o.lines || p.format == weir.Bytes
	if !asIs && len(bytes.TrimSpace(l.text)) == 0 {
		return nil
	}
	if len(p.batch) > 0 && p.size+len(l.text) > batchBytes {
		if err := p.store(ctx); err != nil {
			return err
		}
	}
	payload, err := l.text, error(nil)
	if p.o.lines && p.format != weir.Bytes {
		payload, err = stringJSON(l.text)
	}
	key := p.o.key
	if err == nil && p.o.keyField != "" {
		var found bool
		var text string
		text, found, err = field(l.text, p.o.keyField)
		switch {
		case found:
			key = text
		case err == nil && !p.o.keySet:
			err = fmt.Errorf("it has no field %s for the key; --key gives those without it one, --key '' none", p.o.keyField)
		}
	}
	m := p.message
	if err == nil && p.o.idempotencyField != "" {
		var found bool
		m.IdempotencyKey, found, err = field(l.text, p.o.idempotencyField)
		if err == nil && !found {
			err = fmt.Errorf("it has no field %s for the idempotency key", p.o.idempotencyField)
		}
	}
	if p.messages++; err == nil && p.o.idempotencyKey != "" && p.messages > 1 {
		err = errors.New("--idempotency-key is for one message, this is the second: use --idempotency-field")
	}
	p.lines = append(p.lines, l)
	if err != nil {
		return p.refused(l, err)
	}
	if payload == nil {
		payload = []byte{}
	}
	m.Key, m.Headers, m.Payload = key, p.headers, payload
	p.batch = append(p.batch, m)
	p.size += len(l.text)
	if len(p.batch) == p.o.batch || p.size >= batchBytes {
		return p.store(ctx)
	}
	return nil
}

// store stores the batch.
func (p *producer) store(ctx context.Context) error {
	if len(p.batch) == 0 {
		return nil
	}
	if p.tx != nil {
		stored, err := p.client.CopyTx(ctx, p.tx, p.topic, all(p.batch))
		if err != nil {
			return p.blame(ctx, err)
		}
		p.open += stored
		p.result.Duplicates += int64(len(p.batch)) - stored
	} else {
		produced, err := p.client.Produce(ctx, p.topic, p.batch...)
		if err != nil {
			return p.blame(ctx, err)
		}
		for _, m := range produced {
			if m.Duplicate {
				p.result.Duplicates++
				continue
			}
			if p.result.Stored == 0 {
				p.result.First = m.ID
			}
			p.result.Last = m.ID
			p.result.Stored++
		}
	}
	p.advance()
	p.batch, p.lines, p.size = p.batch[:0], p.lines[:0], 0
	return nil
}

func all(messages []weir.Message) func(yield func(weir.Message, error) bool) {
	return func(yield func(weir.Message, error) bool) {
		for _, m := range messages {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// commit ends the one transaction of --atomic.
func (p *producer) commit(ctx context.Context) error {
	if p.tx == nil {
		return nil
	}
	if err := p.tx.Commit(ctx); err != nil {
		if uncertain(err) {
			p.result.Unknown = p.open
			return fmt.Errorf("%w; the connection was lost at the commit: whether the %s are stored is not known", err, count(p.open, "message"))
		}
		return p.failed(err)
	}
	p.result.Stored = p.open
	p.client.Wake(p.topic)
	return nil
}

// uncertain reports whether a failed statement may have been carried out nevertheless: no answer came.
func uncertain(err error) bool {
	var pg *pgconn.PgError
	var connect *pgconn.ConnectError
	return weir.CanRetry(err) && !errors.As(err, &pg) && !errors.As(err, &connect) && !pgconn.SafeToRetry(err)
}

// blame finds out which line of the batch an error is about.
func (p *producer) blame(ctx context.Context, err error) error {
	var pg *pgconn.PgError
	switch {
	case errors.Is(err, weir.ErrUnknownOutcome):
		p.result.Unknown = int64(len(p.batch))
		return p.failed(fmt.Errorf("%w; whether %s to %s are stored is not known", err, p.lines[0], p.lines[len(p.lines)-1]))
	case errors.Is(err, weir.ErrFormat), errors.Is(err, weir.ErrInvalid):
	case errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "54")):
		// data that the server cannot take, or that exceeds one of its limits
	default:
		return p.failed(err)
	}
	i, cause := p.search(ctx)
	if cause == nil {
		return p.failed(fmt.Errorf("%s to %s: %w", p.lines[0], p.lines[len(p.lines)-1], err))
	}
	if errors.As(cause, &pg) {
		text := pg.Message
		if pg.Detail != "" {
			text += ": " + pg.Detail
		}
		cause = errors.New(strings.TrimSuffix(text, "."))
	}
	return p.refused(p.lines[i], cause)
}

// search finds the first message of the batch that the server refuses, and why: by halves, in transactions that are rolled
// back. The server's word counts, since not all that it refuses can be seen from the text.
func (p *producer) search(ctx context.Context) (int, error) {
	refuses := func(messages []weir.Message) error {
		if p.conn == nil || p.conn.IsClosed() {
			if p.connect(ctx) != nil {
				return nil
			}
		}
		tx, err := p.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			return nil
		}
		_, err = p.client.ProduceTx(ctx, tx, p.topic, messages...)
		return errors.Join(err, tx.Rollback(ctx))
	}
	if p.tx != nil {
		_ = p.tx.Rollback(ctx) // it has failed
	}
	low, high := 0, len(p.batch)
	for high-low > 1 {
		middle := (low + high) / 2
		if refuses(p.batch[low:middle]) != nil {
			high = middle
		} else {
			low = middle
		}
	}
	return low, refuses(p.batch[low:high])
}

func (p *producer) connect(ctx context.Context) (err error) {
	p.conn, err = pgx.Connect(ctx, p.g.dsn)
	return err
}

// refused is the error about a line.
func (p *producer) refused(l line, cause error) error {
	p.result.Refused = l.String()
	text := strings.TrimPrefix(cause.Error(), fmt.Sprintf("produce to topic %q: message 0: ", p.topic))
	if l.number == 1 && bytes.HasPrefix(l.text, []byte("\ufeff")) {
		text += " (it begins with a byte order mark)"
	}
	return p.failed(fmt.Errorf("%s was refused: %s", l, text))
}

// failed adds to an error what was stored.
func (p *producer) failed(err error) error {
	var text string
	switch {
	case p.o.atomic:
		text = "nothing was stored"
	case p.result.Stored == 0 && p.result.Unknown == 0:
		text = "no message was stored"
	default:
		text = fmt.Sprintf("%s stored before", wereStored(p.result.Stored))
	}
	if len(p.lines) > 0 && !p.o.atomic {
		p.result.Resume = p.lines[0].String()
		text += fmt.Sprintf("; go on with %s", p.lines[0])
	}
	return fmt.Errorf("%w; %s", err, text)
}

func wereStored(n int64) string {
	if n == 1 {
		return "1 message was"
	}
	return count(n, "message") + " were"
}

// startBar shows how far it is, on a terminal.
func (p *producer) startBar(size int64) {
	if p.g.quiet || !isTerminal(p.g.err) {
		return
	}
	p.began = time.Now()
	p.bar = progressbar.NewOptions64(size,
		progressbar.OptionSetWriter(p.g.err),
		progressbar.OptionSetWidth(24),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)
}

// advance counts the batch that was just stored.
func (p *producer) advance() {
	if p.bar == nil {
		return
	}
	n := p.result.Stored + p.open
	p.bar.Describe(fmt.Sprintf("%d messages, %.0f/s", n, float64(n)/time.Since(p.began).Seconds()))
	_ = p.bar.Add(p.size + len(p.lines)) // the line breaks too
}

func (p *producer) stopBar() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}
