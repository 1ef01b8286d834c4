package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func init() {
	nats := Peer{
		Name: "nats",
		Short: "NATS JetStream with file storage, which it writes to the disk every two minutes, as it does by default; PublishAsync " +
			"(Publish for a single message), a pull consumer",
		Version: moduleVersion("github.com/nats-io/nats-server/v2", "github.com/nats-io/nats.go"),
		Open:    func(ctx context.Context, e *Env, s Shape) (System, error) { return openNATS(ctx, e, s, false) },
	}
	registerPeer(nats)
	nats.Name = "nats-always"
	nats.Short = "the same with sync_interval always: it writes to the disk before it answers"
	nats.Open = func(ctx context.Context, e *Env, s Shape) (System, error) { return openNATS(ctx, e, s, true) }
	registerPeer(nats)
}

// natsEnv makes this program a NATS server instead: its value is the folder of the messages. A server is a process of its own, as
// PostgreSQL is.
const natsEnv = "WEIR_BENCH_NATS"

// natsServer is that program. It prints its address, and ends when its standard input does: it does not outlive who started it.
func natsServer(folder string) error {
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: folder, NoSigs: true,
		SyncAlways: os.Getenv(natsEnv+"_SYNC") == "always",
	})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		return errors.New("the NATS server does not start")
	}
	fmt.Println(s.ClientURL())
	_, err = io.Copy(io.Discard, os.Stdin)
	s.Shutdown()
	s.WaitForShutdown()
	return err
}

type natsSystem struct {
	process   *exec.Cmd
	stdin     io.Closer
	folder    string
	conns     []*nats.Conn
	producers chan jetstream.JetStream
	stream    jetstream.Stream
	shape     Shape
}

func openNATS(ctx context.Context, e *Env, shape Shape, always bool) (System, error) {
	// Beside the data of PostgreSQL, on the same disk.
	folder, err := os.MkdirTemp(filepath.Dir(filepath.Dir(e.Server.DataDir())), "bench-nats-")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s := &natsSystem{process: exec.Command(self), folder: folder, shape: shape, producers: make(chan jetstream.JetStream, shape.Callers)}
	s.process.Env = append(os.Environ(), natsEnv+"="+folder)
	if always {
		s.process.Env = append(s.process.Env, natsEnv+"_SYNC=always")
	}
	s.process.Stderr = os.Stderr
	if s.stdin, err = s.process.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := s.process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.process.Start(); err != nil {
		return nil, err
	}
	url, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("start a NATS server: %w", err)
	}
	for range shape.Callers + 1 {
		conn, err := nats.Connect(strings.TrimSpace(url))
		if err != nil {
			return nil, err
		}
		s.conns = append(s.conns, conn)
		js, err := jetstream.New(conn)
		if err != nil {
			return nil, err
		}
		if len(s.conns) <= shape.Callers {
			s.producers <- js
			continue
		}
		s.stream, err = js.CreateStream(ctx, jetstream.StreamConfig{
			Name: "orders", Subjects: []string{"orders"}, Storage: jetstream.FileStorage,
		})
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *natsSystem) Produce(ctx context.Context, orders []Order) error {
	js := <-s.producers
	defer func() { s.producers <- js }()
	futures := make([]jetstream.PubAckFuture, 0, len(orders))
	for i := range orders {
		payload, err := json.Marshal(&orders[i])
		if err != nil {
			return err
		}
		if len(orders) == 1 {
			_, err := js.Publish(ctx, "orders", payload)
			return err
		}
		future, err := js.PublishAsync("orders", payload)
		if err != nil {
			return err
		}
		futures = append(futures, future)
	}
	for _, f := range futures {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (s *natsSystem) Consume(ctx context.Context, handle func(*Order)) error {
	config := jetstream.ConsumerConfig{Durable: "billing", AckPolicy: jetstream.AckExplicitPolicy}
	var options []jetstream.PullConsumeOpt
	if !s.shape.Defaults {
		// One acknowledgement for many: the quickest there is.
		config.AckPolicy, config.MaxAckPending = jetstream.AckAllPolicy, 20_000
		options = append(options, jetstream.PullMaxMessages(5000))
	}
	consumer, err := s.stream.CreateConsumer(ctx, config)
	if err != nil {
		return err
	}
	var failed error
	done, fail := context.WithCancel(ctx)
	defer fail()
	since := 0
	consuming, err := consumer.Consume(func(m jetstream.Msg) {
		var o Order
		err := json.Unmarshal(m.Data(), &o)
		if err == nil {
			handle(&o)
			since++
			if s.shape.Defaults || since%500 == 0 || lastPending(m) {
				err = m.Ack()
			}
		}
		if err != nil {
			failed = err
			fail()
		}
	}, options...)
	if err != nil {
		return err
	}
	<-done.Done()
	consuming.Stop()
	<-consuming.Closed()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return failed
}

// lastPending reports whether nothing comes after a message as yet.
func lastPending(m jetstream.Msg) bool {
	meta, err := m.Metadata()
	return err == nil && meta.NumPending == 0
}

func (s *natsSystem) Close() {
	for _, c := range s.conns {
		c.Close()
	}
	_ = s.stdin.Close()
	_ = s.process.Wait()
	os.RemoveAll(s.folder)
}
